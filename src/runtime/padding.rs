//! Does padding change answers? Found out by running, while a model loads.
//!
//! Rows of several lengths run alone and exactly as long as they are, and then again padded, beside longer ones. Whatever fills up
//! must not show in the answers of a row; a model of which it does gets no padding. The same runs show which dimensions of outputs
//! follow the length of a row, where the names in the graph do not say so, and which lengths do not run at all.

use super::synthetic::synthetic;
use super::{Batch, BatchPart, Ran, RunError, Session};
use crate::clock::Clock;
use crate::model::pad::PaddedAxis;
use crate::model::settings::Fill;
use crate::model::{Dim, InferRequest, InputTensor, ModelSpec, PadPlan, TensorSpec, ValidRequest};
use crate::tensor::{DataType, Shape, Tensor};
use crate::units::{BatchId, ByteSize, Rows};
use std::sync::Arc;

/// Answers of the same row may differ by this part of the largest value of their output: sums in another order do.
const TOLERANCE: f64 = 1e-5;
/// The same where values have few digits, or are computed on a GPU, whose products have fewer: those of TF32, which is on there
/// by default, have eleven bits, as the values of FP16 have, so that 5e-4 is what one rounding can do, and layers add them up.
const COARSE: f64 = 1e-2;
/// Longer neighbours show nothing more and take longer.
const MOST_NEIGHBOUR: usize = 128;

/// What padding does to the answers of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Confirmed {
    /// What may be padded: the lengths that run, and all axes of outputs that follow them.
    pub plan: PadPlan,
    /// The largest difference that was seen, as a part of the largest value of the output.
    pub difference: f64,
}

/// Compares rows that run alone with the same rows padded. The spec must have a [`PadPlan`]. The session's own
/// is the one of the last run afterwards: set it before the session runs anything else.
///
/// # Errors
/// Why the model's rows must not be padded, in words for the operator.
pub fn confirm_padding(session: &mut Session, spec: &ModelSpec, clock: Clock) -> Result<Confirmed, String> {
    let plan = spec.padding.clone().ok_or("nothing is to be padded")?;
    let mut run = Comparison { session, spec, plan, clock, integers: Integers::Mixed, hides: false };
    let result = run.confirm();
    let Comparison { plan, .. } = run;
    result.map(|difference| Confirmed { plan, difference })
}

/// Answers to rows that are always the same: alone, beside others, and padded where the spec says that rows are, else with masks that
/// hide something. Two forms of a model are compared by them. The session's spec is another one afterwards.
///
/// # Errors
/// Why it does not run on them.
pub fn sample(session: &mut Session, spec: &ModelSpec, clock: Clock) -> Result<Vec<Vec<Tensor>>, String> {
    let plan = spec.padding.clone().unwrap_or_default();
    let mut run = Comparison { session, spec, plan, clock, integers: Integers::Mixed, hides: false };
    run.settle()?;
    run.sample().map_err(|error| error.to_string())
}

/// What integers are of which the settings say nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Integers {
    /// Small ones, so that not all are what fills up; masks let everything through.
    Mixed,
    /// All ones.
    One,
}

struct Comparison<'a> {
    session: &'a mut Session,
    spec: &'a ModelSpec,
    plan: PadPlan,
    clock: Clock,
    integers: Integers,
    /// Whether masks of every other row hide the second half of their last axis, and do not let everything through.
    hides: bool,
}

impl Comparison<'_> {
    fn confirm(&mut self) -> Result<f64, String> {
        self.settle()?;
        for dim in 0..self.plan.dims.len() {
            self.drop_what_does_not_run(dim)?;
        }
        self.find_axes()?;
        let (mut worst, mut limit) = (0.0_f64, TOLERANCE);
        if self.session.overlaps() {
            limit = COARSE;
        }
        for (short, long) in self.pairs() {
            let alone = self.alone(&short).map_err(|error| format!("{short:?} alone: {error}"))?;
            let beside = self.padded(&short, &long).map_err(|error| format!("{short:?} beside {long:?}: {error}"))?;
            for ((output, alone), beside) in self.spec.outputs.iter().zip(&alone).zip(&beside) {
                let limit = if has_few_digits(output.datatype) { COARSE } else { limit };
                let difference = difference(alone, beside);
                if difference > limit {
                    return Err(format!(
                        "output '{}' of a row of {} differs by {difference:.1e} of its largest value if the row is padded to {}, \
                         more than {limit:.0e}",
                        output.name,
                        self.describe(&short),
                        self.describe(&long)
                    ));
                }
                worst = worst.max(difference);
            }
        }
        Ok(worst)
    }

    fn sample(&mut self) -> Result<Vec<Vec<Tensor>>, RunError> {
        if self.plan.dims.is_empty() {
            self.hides = true;
            let rows: [&[usize]; 4] = [&[]; 4];
            let rows = if self.spec.batch_axis.is_some() { &rows[..] } else { &rows[..1] };
            let mut answers = self.run(Arc::new(self.spec.clone()), rows)?;
            answers.push(self.alone(&[])?);
            return Ok(answers);
        }
        let mut answers = Vec::new();
        for (short, long) in self.pairs() {
            answers.push(self.alone(&long)?);
            let beside = ModelSpec { padding: Some(self.plan.clone()), ..self.spec.clone() };
            answers.extend(self.run(Arc::new(beside), &[&short, &long])?);
        }
        answers.extend(self.uneven()?);
        Ok(answers)
    }

    /// The answer to a row of which every other dimension is short, if the model bears that.
    fn uneven(&mut self) -> Result<Option<Vec<Tensor>>, RunError> {
        let Some((short, long)) = self.pairs().pop() else { return Ok(None) };
        let size = |(at, (short, long)): (usize, (usize, usize))| if at % 2 == 0 { short.div_ceil(2) } else { long };
        let sizes: Vec<usize> = short.into_iter().zip(long).enumerate().map(size).collect();
        match self.alone(&sizes) {
            Err(RunError::Model(_)) => Ok(None),
            answer => answer.map(Some),
        }
    }

    /// Finds integers that the model bears.
    fn settle(&mut self) -> Result<(), String> {
        let shortest: Vec<usize> = self.plan.dims.iter().map(|dim| dim.lengths[0]).collect();
        let mut fault = String::new();
        for integers in [Integers::Mixed, Integers::One] {
            self.integers = integers;
            match self.alone(&shortest) {
                Ok(_) => return Ok(()),
                Err(error) => fault = error.to_string(),
            }
        }
        Err(format!("it does not run on synthetic rows ({fault}); [warmup] in model.toml can help"))
    }

    /// Positions have an end in most models: lengths beyond it fail.
    fn drop_what_does_not_run(&mut self, dim: usize) -> Result<(), String> {
        loop {
            let mut sizes: Vec<usize> = self.plan.dims.iter().map(|dim| dim.lengths[0]).collect();
            let Some(&longest) = self.plan.dims[dim].lengths.last() else {
                return Err(format!("no length of '{}' runs", self.plan.dims[dim].name));
            };
            sizes[dim] = longest;
            match self.alone(&sizes) {
                // What is too long for the memory of this moment may fit in another.
                Ok(_) | Err(RunError::OutOfMemory { .. }) => return Ok(()),
                Err(RunError::Model(_)) => drop(self.plan.dims[dim].lengths.pop()),
                Err(error @ RunError::Lost(_)) => return Err(error.to_string()),
            }
        }
    }

    /// Output axes that are as long as the rows, in two runs of different lengths.
    fn find_axes(&mut self) -> Result<(), String> {
        for dim in 0..self.plan.dims.len() {
            let mut shapes: Vec<(usize, Vec<Shape>)> = Vec::new();
            // Sizes that hardly are anything else's.
            for size in [3, 5] {
                let mut sizes: Vec<usize> = self.plan.dims.iter().map(|dim| dim.lengths[0]).collect();
                sizes[dim] = size.min(self.plan.dims[dim].lengths.last().copied().unwrap_or(1));
                let outputs = self.alone(&sizes).map_err(|error| error.to_string())?;
                shapes.push((sizes[dim], outputs.into_iter().map(|output| output.shape).collect()));
            }
            let [(a, first), (b, second)] = shapes.as_slice() else { continue };
            if a == b {
                continue;
            }
            for (output, axes) in self.plan.outputs.iter_mut().enumerate() {
                let sizes = first[output].iter().zip(&second[output]).enumerate();
                let follows = sizes.filter(|(axis, sizes)| *sizes == (a, b) && self.spec.batch_axis != Some(*axis));
                let found: Vec<usize> = follows.map(|(axis, _)| axis).collect();
                for axis in
                    found.into_iter().filter(|axis| !axes.iter().any(|known| known.axis == *axis)).collect::<Vec<_>>()
                {
                    axes.push(PaddedAxis { axis, dim });
                }
            }
        }
        Ok(())
    }

    /// Sizes of a row, and of the neighbour that it is padded to.
    fn pairs(&self) -> Vec<(Vec<usize>, Vec<usize>)> {
        let at = |part: f64, longest: bool| -> Vec<usize> {
            let size = |dim: &crate::model::pad::PaddedDim| {
                let most = dim.lengths.partition_point(|length| *length <= MOST_NEIGHBOUR).max(1);
                let at = (part * (most - 1) as f64).round() as usize;
                let before = at.checked_sub(1).map_or(0, |before| dim.lengths[before]);
                if longest { dim.lengths[at] } else { before + 1 }
            };
            self.plan.dims.iter().map(size).collect()
        };
        vec![
            (at(0.0, false), at(0.0, true)),
            (at(0.0, false), at(1.0, true)),
            (at(0.25, false), at(0.5, true)),
            (at(0.5, true), at(1.0, true)),
            (at(1.0, false), at(1.0, true)),
        ]
    }

    /// The outputs of one row that runs exactly as long as it is.
    fn alone(&mut self, sizes: &[usize]) -> Result<Vec<Tensor>, RunError> {
        let spec = ModelSpec { padding: None, ..self.spec.clone() };
        Ok(self.run(Arc::new(spec), &[sizes])?.swap_remove(0))
    }

    /// The outputs of the same row beside one that is longer.
    fn padded(&mut self, sizes: &[usize], neighbour: &[usize]) -> Result<Vec<Tensor>, RunError> {
        let spec = ModelSpec { padding: Some(self.plan.clone()), ..self.spec.clone() };
        Ok(self.run(Arc::new(spec), &[sizes, neighbour])?.swap_remove(0))
    }

    /// The outputs of each of these rows.
    fn run(&mut self, spec: Arc<ModelSpec>, rows: &[&[usize]]) -> Result<Vec<Vec<Tensor>>, RunError> {
        let part = |(seed, sizes): (usize, &&[usize])| {
            let inputs = spec.inputs.iter().map(|input| self.input(&spec, input, (sizes, seed))).collect();
            let request = InferRequest { inputs, ..InferRequest::default() };
            let request = ValidRequest::new(Arc::clone(&spec), request, Rows::MAX);
            let request = Arc::new(request.map_err(|fault| RunError::Model(fault.message))?);
            Ok(BatchPart { request, start: 0, rows: 1 })
        };
        let parts: Vec<BatchPart> = rows.iter().enumerate().map(part).collect::<Result<_, RunError>>()?;
        let batch = Batch { id: BatchId::default(), bytes: ByteSize::ZERO, padded_rows: parts.len() as Rows, parts };
        self.session.set_spec(spec);
        let Ran { result, .. } = self.session.run(&batch, self.clock);
        result
    }

    fn input(&self, spec: &ModelSpec, input: &TensorSpec, (sizes, seed): (&[usize], usize)) -> InputTensor {
        let warmup = &spec.settings.warmup;
        let size = |(axis, dim): (usize, &Dim)| match dim {
            _ if spec.batch_axis == Some(axis) => 1,
            Dim::Fixed(size) => *size,
            Dim::Symbol(name) => match self.plan.dims.iter().position(|padded| padded.name == *name) {
                Some(padded) => sizes[padded],
                None => warmup.dims.get(name).copied().unwrap_or(warmup.default_dim),
            },
            Dim::Any => warmup.default_dim,
        };
        let shape: Shape = input.shape.iter().enumerate().map(size).collect();
        let is_integer = matches!(input.datatype, DataType::Int32 | DataType::Int64);
        let tensor = match warmup.inputs.get(&input.name) {
            Some(fill) => synthetic(input.datatype, shape, *fill),
            None if input.name.contains("mask") => mask(input.datatype, shape, self.hides && seed % 2 == 1),
            None if is_integer && self.integers == Integers::Mixed => small_integers(input, shape, seed),
            None if is_integer => synthetic(input.datatype, shape, Fill::One),
            None if input.datatype == DataType::Fp32 => small_floats(shape, seed),
            None => synthetic(input.datatype, shape, Fill::Random),
        };
        InputTensor { name: input.name.clone(), tensor }
    }

    fn describe(&self, sizes: &[usize]) -> String {
        let sizes: Vec<String> =
            self.plan.dims.iter().zip(sizes).map(|(dim, size)| format!("{} = {size}", dim.name)).collect();
        sizes.join(", ")
    }
}

/// Ones; if it hides something, up to half of the last axis only.
fn mask(datatype: DataType, shape: Shape, hides: bool) -> Tensor {
    let ones = synthetic(datatype, shape, Fill::One);
    let last = ones.shape.last().copied().filter(|last| hides && *last > 1);
    let (Some(last), Some(size)) = (last, datatype.size()) else { return ones };
    let mut data = ones.data.to_contiguous().to_vec();
    data.chunks_mut(last * size).for_each(|row| row[last.div_ceil(2) * size..].fill(0));
    Tensor { data: data.into(), ..ones }
}

/// Small integers, others for another seed. Types of tokens are two in most models; of what else there is, more differ.
fn small_integers(input: &TensorSpec, shape: Shape, seed: usize) -> Tensor {
    let kinds = if input.name.contains("type") { 2 } else { 5 };
    let count: usize = shape.iter().product();
    let values = (0..count).map(|at| ((at * at + 3 * at + seed + 1) % kinds) as u8);
    let data: Vec<u8> = match input.datatype {
        DataType::Int32 => values.flat_map(|value| i32::from(value).to_le_bytes()).collect(),
        _ => values.flat_map(|value| i64::from(value).to_le_bytes()).collect(),
    };
    Tensor { datatype: input.datatype, shape, data: data.into() }
}

/// Numbers from -1 to 1, others for another seed: of positive ones a zero that fills up would not change the largest.
fn small_floats(shape: Shape, seed: usize) -> Tensor {
    let count: usize = shape.iter().product();
    let value = |at: usize| ((at * 37 + seed * 11 + 7) % 101) as f32 / 50.0 - 1.0;
    let data: Vec<u8> = (0..count).flat_map(|at| value(at).to_le_bytes()).collect();
    Tensor { datatype: DataType::Fp32, shape, data: data.into() }
}

fn has_few_digits(datatype: DataType) -> bool {
    matches!(datatype, DataType::Fp16 | DataType::Bf16)
}

/// The largest difference as a part of the largest value; infinite where shapes differ, or what cannot be a little different.
#[must_use]
pub fn difference(alone: &Tensor, padded: &Tensor) -> f64 {
    if alone.shape != padded.shape {
        return f64::INFINITY;
    }
    let (alone, padded) = match (floats(alone), floats(padded)) {
        (Some(alone), Some(padded)) => (alone, padded),
        _ => return if alone.data == padded.data { 0.0 } else { f64::INFINITY },
    };
    let largest = alone.iter().filter(|value| value.is_finite()).fold(0.0_f64, |most, value| most.max(value.abs()));
    // Equal ones first: of two infinities there is no difference to compute.
    let apart = |(a, b): (&f64, &f64)| match (a - b).abs() {
        _ if a == b || a.is_nan() && b.is_nan() => 0.0,
        apart if apart.is_nan() => f64::INFINITY,
        apart => apart,
    };
    let most = alone.iter().zip(&padded).map(apart).fold(0.0_f64, f64::max);
    if most == 0.0 { 0.0 } else { most / largest.max(f64::MIN_POSITIVE) }
}

fn floats(tensor: &Tensor) -> Option<Vec<f64>> {
    let data = tensor.data.to_contiguous();
    Some(match tensor.datatype {
        DataType::Fp32 => data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]).into()).collect(),
        DataType::Fp16 => data.chunks_exact(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f64()).collect(),
        DataType::Bf16 => data.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f64()).collect(),
        DataType::Fp64 => {
            let value = |b: &[u8]| f64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]);
            data.chunks_exact(8).map(value).collect()
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(values: &[f32]) -> Tensor {
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Tensor { datatype: DataType::Fp32, shape: [values.len()].as_slice().into(), data: data.into() }
    }

    #[test]
    fn differences_are_parts_of_the_largest_value() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        for (a, b, expected) in [
            (vec![1.0, 2.0], vec![1.0, 2.0], 0.0),
            (vec![1.0, 2.0], vec![1.5, 2.0], 0.25),
            (vec![nan, inf, 1.0], vec![nan, inf, 1.0], 0.0),
            (vec![1.0], vec![1.0, 2.0], f64::INFINITY),
        ] {
            assert_eq!(difference(&tensor(&a), &tensor(&b)), expected, "{a:?} {b:?}");
        }
        assert_eq!(difference(&tensor(&[1.0, 2.0]), &tensor(&[nan, 2.0])), f64::INFINITY);
        let words = |bytes: &[u8]| Tensor {
            datatype: DataType::Uint8,
            shape: [2].as_slice().into(),
            data: bytes.to_vec().into(),
        };
        assert_eq!(
            (difference(&words(&[1, 2]), &words(&[1, 2])), difference(&words(&[1, 2]), &words(&[1, 3]))),
            (0.0, f64::INFINITY)
        );
    }
}
