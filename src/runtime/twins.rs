//! Several sessions of one model for one instance on a GPU. An operator that keeps a plan for the shape that it ran last, and makes a
//! new one whenever that changes, would spend more time on plans than on rows where batches have several sizes. So each
//! session stays with the shapes that it knows, as far as there are enough of them. They share the weights, the memory
//! and the stream, and only one runs at a time.

use crate::tensor::Shape;
use ort::session::{IoBinding, Session};

/// Sessions beside the first one, for a model whose operators plan by shape: enough for a ladder from 16 to 256, below which runs
/// are recorded, and another size.
pub(super) const TWINS: usize = 5;

/// The sessions of one instance.
pub(super) struct Twins {
    each: Vec<Twin>,
    runs: u64,
}

struct Twin {
    // Before the session that it is a part of.
    binding: IoBinding,
    /// `None` for the first one, which somebody else owns.
    session: Option<Session>,
    last: Last,
}

/// What a session ran last.
#[derive(Clone, Debug, Default)]
struct Last {
    shapes: Vec<Shape>,
    run: u64,
}

impl Twins {
    /// The session that `first` is, and others of the same model.
    ///
    /// # Errors
    /// ONNX Runtime's.
    pub(super) fn new(first: &Session, others: Vec<Session>) -> ort::Result<Self> {
        let first = Twin { binding: first.create_binding()?, session: None, last: Last::default() };
        let mut each = vec![first];
        for session in others {
            each.push(Twin { binding: session.create_binding()?, session: Some(session), last: Last::default() });
        }
        Ok(Self { each, runs: 0 })
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.each.len()
    }

    /// The session that is to run these shapes, and its binding. `first` is the one that it was made with.
    pub(super) fn for_shapes<'a>(
        &'a mut self,
        first: &'a mut Session,
        shapes: &[Shape],
    ) -> (&'a mut Session, &'a mut IoBinding) {
        self.runs += 1;
        let index = choose(self.each.iter().map(|twin| &twin.last), shapes);
        let Twin { binding, session, last } = &mut self.each[index];
        *last = Last { shapes: shapes.to_vec(), run: self.runs };
        (session.as_mut().unwrap_or(first), binding)
    }

    /// Lets go of all inputs and outputs.
    pub(super) fn clear(&mut self) {
        for twin in &mut self.each {
            twin.binding.clear_outputs();
            twin.binding.clear_inputs();
        }
    }
}

/// The one that ran the same shapes last, or else that which has not run for the longest time.
fn choose<'a>(each: impl Iterator<Item = &'a Last> + Clone, shapes: &[Shape]) -> usize {
    let same = each.clone().position(|last| last.shapes == shapes);
    let oldest = || each.enumerate().min_by_key(|(_, last)| last.run).map_or(0, |(index, _)| index);
    same.unwrap_or_else(oldest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_stay_with_the_session_that_knows_them_and_new_ones_take_the_place_of_the_oldest() {
        let mut each = vec![Last::default(); 3];
        let mut run = |run: u64, rows: usize| {
            let shapes = vec![Shape::from_slice(&[rows, 4])];
            let index = choose(each.iter(), &shapes);
            each[index] = Last { shapes, run };
            index
        };
        let taken: Vec<usize> =
            [8, 4, 8, 2, 4, 8, 1, 8, 2].into_iter().zip(1..).map(|(rows, at)| run(at, rows)).collect();
        // 1 takes the place of 2, which takes that of 4.
        assert_eq!(taken, [0, 1, 0, 2, 1, 0, 2, 0, 1]);
    }
}
