//! Who is recorded, what there is room for, and what becomes of it when a collector fails.

use super::*;
use crate::metrics::Metrics;
use crate::units::Instant;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::trace::{SpanData, SpanExporter};
use std::sync::Mutex;
use tokio::sync::oneshot;

/// Keeps what it gets; told to fail, it keeps it all the same.
#[derive(Clone, Debug, Default)]
struct Kept {
    spans: Arc<Mutex<Vec<Vec<SpanData>>>>,
    fails: bool,
}

impl SpanExporter for Kept {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        self.spans.lock().unwrap().push(batch);
        if self.fails { Err(OTelSdkError::InternalFailure("on purpose".to_owned())) } else { Ok(()) }
    }
}

fn settings(sampler: Sampler, ratio: f64, most: usize) -> Settings {
    let max_queue_spans = NonZeroUsize::new(most).unwrap();
    Settings { endpoint: None, service_name: "s".to_owned(), sampler, ratio, max_queue_spans }
}

fn headers(flags: &str) -> HeaderMap {
    let value = format!("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flags}");
    HeaderMap::from_iter([(TRACE_PARENT, HeaderValue::try_from(value).unwrap())])
}

fn at(millis: u64) -> Instant {
    Instant::default() + Duration::from_millis(millis)
}

#[tokio::test]
async fn samplers_do_what_opentelemetry_says() {
    use Sampler::*;
    for (sampler, ratio, parents, alone) in [
        (AlwaysOn, 0.0, [true, true], true),
        (AlwaysOff, 1.0, [false, false], false),
        (Ratio, 1.0, [true, true], true),
        (Ratio, 0.0, [false, false], false),
        (ParentOrOn, 0.0, [true, false], true),
        (ParentOrOff, 1.0, [true, false], false),
        (ParentOrRatio, 0.0, [true, false], false),
        (ParentOrRatio, 1.0, [true, false], true),
    ] {
        let (tracer, _recorded) = Tracer::new(&settings(sampler, ratio, 1), Clock::start(), Metrics::new().spans());
        let decided = ["01", "00"].map(|flags| tracer.begin(&headers(flags)).is_recorded());
        assert_eq!((decided, tracer.begin(&HeaderMap::new()).is_recorded()), (parents, alone), "{sampler:?} {ratio}");
    }
    let (tracer, _recorded) = Tracer::new(&settings(ParentOrRatio, 0.25, 1), Clock::start(), Metrics::new().spans());
    let recorded = (0..4000).filter(|_| tracer.begin(&HeaderMap::new()).is_recorded()).count();
    // Six standard deviations around a quarter.
    assert!((836..=1164).contains(&recorded), "{recorded} of 4000");
}

#[tokio::test(start_paused = true)]
async fn what_does_not_fit_is_dropped_and_room_comes_back_when_it_is_sent() {
    let counts = Metrics::new().spans();
    let (tracer, recorded) = Tracer::new(&settings(Sampler::AlwaysOn, 1.0, 5), Clock::start(), counts.clone());
    let trace = tracer.begin(&HeaderMap::new());
    let run = Run {
        batch: tracer.batch(),
        // A batch that found no memory was never computed.
        stages: [Stage::Gather, Stage::Compute, Stage::Scatter]
            .map(|stage| (stage, if stage == Stage::Gather { at(3) } else { at(0) }, Duration::from_millis(1))),
    };
    let way = || trace.way(at(1), at(2), vec![run.clone(), run.clone()]);
    way();
    way();
    assert_eq!(counts.dropped.get(), 3, "two runs of one stage and a wait");
    trace.stage(Stage::Decode, at(1), at(1));
    trace.end("r".into(), Vec::new(), None);
    trace.stage(Stage::Encode, at(1), at(1));
    assert_eq!(counts.dropped.get(), 4);
    let kept = Kept::default();
    let (stop, stopped) = oneshot::channel();
    let task = tokio::spawn(Exporter::new(kept.clone(), recorded).run(stopped));
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!((counts.exported.get(), kept.spans.lock().unwrap().concat().len()), (5, 5));
    way();
    stop.send(()).unwrap();
    task.await.unwrap();
    assert_eq!((counts.exported.get(), counts.dropped.get(), counts.failed.get()), (8, 4, 0), "room had come back");
    way();
    assert_eq!(counts.dropped.get(), 7, "nobody is there any more");
    let names: Vec<_> = kept.spans.lock().unwrap().concat().into_iter().map(|span| span.name).collect();
    assert_eq!(names, ["queue", "gather", "gather", "decode", "r", "queue", "gather", "gather"]);
}

#[tokio::test(start_paused = true)]
async fn spans_go_together_after_a_second_or_when_there_are_many() {
    let counts = Metrics::new().spans();
    let (tracer, recorded) = Tracer::new(&settings(Sampler::AlwaysOn, 1.0, 2000), Clock::start(), counts.clone());
    let trace = tracer.begin(&HeaderMap::new());
    (0..1100).for_each(|_| trace.stage(Stage::Decode, at(1), at(1)));
    let kept = Kept { fails: true, ..Kept::default() };
    let (_stop, stopped) = oneshot::channel();
    tokio::spawn(Exporter::new(kept.clone(), recorded).run(stopped));
    let sizes = || kept.spans.lock().unwrap().iter().map(Vec::len).collect::<Vec<_>>();
    tokio::time::sleep(Duration::from_millis(900)).await;
    assert_eq!(sizes(), [512, 512]);
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(sizes(), [512, 512, 76]);
    assert_eq!((counts.failed.get(), counts.exported.get()), (1100, 0));
}

#[tokio::test]
async fn a_batch_of_very_many_requests_links_to_some_and_counts_the_rest() {
    let (tracer, recorded) = Tracer::new(&settings(Sampler::AlwaysOn, 1.0, 2), Clock::start(), Metrics::new().spans());
    let requests = (0..1500).map(|_| tracer.batch()).collect();
    let batch = Batch {
        span: tracer.batch(),
        begun: at(1),
        ended: at(2),
        attributes: vec![],
        requests,
        failure: Some("failed"),
    };
    tracer.record(Record::Batch(Box::new(batch)));
    drop(tracer);
    let kept = Kept::default();
    let (stop, stopped) = oneshot::channel::<()>();
    drop(stop);
    Exporter::new(kept.clone(), recorded).run(stopped).await;
    let spans = kept.spans.lock().unwrap().concat();
    assert_eq!((spans.len(), spans[0].links.len(), spans[0].links.dropped_count), (1, 1024, 476));
    assert_eq!(spans[0].status, opentelemetry::trace::Status::error("failed"));
}
