//! Recorded runs: their answers, and how they go when memory is short.

use super::*;
use concertina::runtime::Moment;
use std::time::Duration;

const SIZES: [Rows; 4] = [1, 2, 4, 8];

/// A model whose first sizes are recorded, and the answers to batches of one to eight rows before they were.
struct Taped {
    loaded: Loaded,
    batches: Vec<Batch>,
    plain: Vec<Vec<f32>>,
}

fn record(device: &Device, name: &str, file: &Path) -> Taped {
    let mut loaded = load(device, file, Some(0)).unwrap();
    let batches: Vec<Batch> = (1..=8).map(|rows| loaded.batch(rows, rows, u64::from(rows))).collect();
    let plain: Vec<Vec<f32>> = batches.iter().map(|batch| values(loaded.run(batch))).collect();
    // Its weights are those of the session, which has them for itself here: the recordings have theirs.
    let weights = Weights::upload(device, file, (name, 1)).unwrap();
    println!("NUMBER {name}: {weights:?}");
    let cuda = CudaOptions { weights: Some(Arc::new(weights)), ..CudaOptions::default() };
    let recipe = Recipe::new(support::runtime(), file, cuda, (device, name, 1)).unwrap();
    // The shapes that are recorded are those of synthetic requests: as long as ours.
    let plan = Plan { recipe, sizes: SIZES.to_vec(), mode: CudaGraph::On, integers: Fill::One };
    let mut settings = Settings::default();
    settings.warmup.default_dim = 16;
    let spec = Arc::new(ModelSpec { settings, ..ModelSpec::clone(&loaded.spec) });
    loaded.session.set_spec(spec);
    loaded.session.plan_recording(plan);
    let recorded = loaded.session.record(loaded.clock);
    println!("NUMBER {name}: recorded {recorded:?}");
    assert_eq!(loaded.session.recorded(), SIZES, "{name}");
    for (rows, _) in recorded {
        let device = loaded.session.device_time(rows).unwrap();
        // By the host's clock, which knows nothing of the device's.
        let begin = loaded.clock.now();
        loaded.run(&batches[rows as usize - 1]);
        let took = loaded.clock.now().since(begin);
        assert!(device > Duration::ZERO && device <= took, "{name}: {rows} rows: {device:?} of {took:?}");
    }
    Taped { loaded, batches, plain }
}

/// Another way through the same kernels: TF32 has ten bits.
fn assert_close(answer: &[f32], expected: &[f32], what: &dyn std::fmt::Debug) {
    let largest = expected.iter().fold(1e-6f32, |most, value| most.max(value.abs()));
    let apart = answer.iter().zip(expected).map(|(a, b)| (a - b).abs() / largest).fold(0.0, f32::max);
    assert!(answer.len() == expected.len() && apart < 5e-3, "{what:?}: {apart}");
}

#[test]
fn recorded_runs_give_the_same_answers_and_go_first_when_memory_is_short() {
    let Some(gpu) = gpu_with_provider() else { return };
    for (name, file) in models() {
        let device = device(gpu, ByteSize::MAX);
        let Taped { mut loaded, batches, plain } = record(&device, name, &file);
        for round in 0..3 {
            for (batch, plain) in batches.iter().zip(&plain) {
                assert_close(&values(loaded.run(batch)), plain, &(name, round));
            }
        }
        let before = device.stats().committed;
        assert!(device.shed(), "{name}: there is something to give up");
        assert_eq!(loaded.session.recorded(), [0; 0], "{name}");
        device.trim(at(2_000_000));
        device.trim(at(2_000_010));
        assert!(device.stats().committed < before, "{name}");
        assert_eq!(values(loaded.run(&batches[2])), plain[2], "{name}: it runs without");
    }
}

/// Each batch must get its own answer, whenever the recording goes that the second one was staged for, and whether the first
/// one was played or not.
#[test]
fn a_recording_that_goes_between_stage_and_launch_costs_nobody_an_answer() {
    let Some(gpu) = gpu_with_provider() else { return };
    for (name, file) in models() {
        // A run of nine rows is not recorded; the others are.
        for (first, when) in [
            (4, Some(Moment::SecondWaits)),
            (4, Some(Moment::FirstComputes)),
            (9, Some(Moment::SecondWaits)),
            (9, Some(Moment::FirstComputes)),
            (4, None),
        ] {
            let case = (name, first, when);
            let device = device(gpu, ByteSize::MAX);
            let Taped { mut loaded, batches, plain } = record(&device, name, &file);
            let nine = loaded.batch(9, 9, 77);
            let expected_of_nine = values(loaded.run(&nine));
            let (a, expected) = if first == 9 { (&nine, &expected_of_nine) } else { (&batches[3], &plain[3]) };
            let look = |moment| {
                if Some(moment) == when {
                    let given_up = device.shed();
                    // What plays goes behind its run.
                    let plays = first == 4 && moment == Moment::FirstComputes;
                    assert_eq!(given_up, !plays, "{case:?}");
                }
            };
            let [ran, following] = loaded.session.run_ahead([a, &batches[1]], loaded.clock, look);
            assert_close(&values(ran), expected, &case);
            assert_close(&values(following), &plain[1], &case);
            assert_eq!(loaded.session.recorded().len(), if when.is_some() { 0 } else { 4 }, "{case:?}");
            // And so on, on either slot.
            for rows in [1, 5, 2, 8] {
                assert_close(&values(loaded.run(&batches[rows - 1])), &plain[rows - 1], &case);
            }
        }
    }
}
