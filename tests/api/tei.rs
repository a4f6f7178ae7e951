//! The routes of Text Embeddings Inference, over the arithmetic of `text.rs`: the scores of a text are the mean of its token
//! ids and their number; words are ids from 10 on.

use crate::support::{App, Reply, app_answering, echo, state, tensor};
use crate::text::{matrix, mean_and_count, model, post, text_model};
use axum::body::Body;
use axum::http::Request;
use concertina::batcher::InferError;
use concertina::http::{Bodies, router};
use concertina::model::{Dim, InferResponse, ModelSpec, OutputTensor, TensorSpec, ValidRequest};
use concertina::tensor::{DataType, Tensor};
use concertina::text::Folder;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::sync::Arc;

fn folder() -> Folder {
    Folder { max_tokens: Some(12), ..Folder::default() }
}

fn embedder(name: &str) -> ModelSpec {
    let settings = "[text]\nnormalize = false\ndefault_prompt = \"none\"\n[text.prompts]\nnone = \"\"\nd = \"d \"";
    model(name, settings, ("sentence_embedding", 2), &folder())
}

fn classifier(name: &str, labels: &[&str]) -> ModelSpec {
    let labels: Vec<String> = labels.iter().map(|&label| label.to_owned()).collect();
    let width = labels.len();
    model(name, "", ("logits", width), &Folder { labels, classifies: true, ..folder() })
}

/// A model whose vector for a token is its id.
fn encoder() -> ModelSpec {
    let hidden = vec![Dim::Symbol("batch".to_owned()), Dim::Symbol("sequence".to_owned()), Dim::Fixed(1)];
    let output = TensorSpec { name: "last_hidden_state".to_owned(), datatype: DataType::Fp32, shape: hidden };
    let ids = |name| matrix(name, DataType::Int64, Dim::Symbol("sequence".to_owned()));
    text_model("encoder", "", vec![ids("input_ids"), ids("attention_mask")], vec![output], &folder())
}

fn ids_themselves(request: &ValidRequest) -> Result<InferResponse, InferError> {
    let ids = &request.inputs[0];
    let values = ids.data.to_contiguous();
    let values =
        values.chunks(8).flat_map(|bytes| (i64::from_le_bytes(bytes.try_into().unwrap()) as f32).to_le_bytes());
    let shape = [ids.shape[0], ids.shape[1], 1].as_slice().into();
    let tensor = Tensor { datatype: DataType::Fp32, shape, data: values.collect::<Vec<u8>>().into() };
    Ok(InferResponse { outputs: vec![OutputTensor { index: 0, tensor }] })
}

fn app(specs: Vec<ModelSpec>) -> App {
    app_answering(specs, mean_and_count)
}

async fn ask(app: &App, path: &str, body: Value) -> Value {
    let reply = post(app, path, &body).await;
    assert_eq!(reply.status, 200, "{path} {body}: {}", reply.text());
    assert_eq!(reply.outcome.as_ref().unwrap().failure, None);
    reply.json()
}

/// The status, the kind and the text of a failure.
fn failure(reply: &Reply) -> (u16, String, String) {
    let json = reply.json();
    let text = |key: &str| json[key].as_str().unwrap().to_owned();
    (reply.status.as_u16(), text("error_type"), text("error"))
}

/// Numbers within what a float can tell.
fn assert_near(got: &Value, expected: &[f64]) {
    let got: Vec<f64> = got.as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect();
    assert_eq!(got.len(), expected.len(), "{got:?}");
    for (one, other) in got.iter().zip(expected) {
        assert!((one - other).abs() < 1e-5, "{got:?} {expected:?}");
    }
}

#[tokio::test]
async fn embed_answers_rows_for_every_form_of_input() {
    let app = app(vec![embedder("m")]);
    for (inputs, rows) in [
        (json!("a b"), json!([[6.0, 4.0]])),
        (json!(["a b", "c"]), json!([[6.0, 4.0], [5.0, 3.0]])),
        (json!([10, 12]), json!([[11.0, 2.0]])),
        (json!([[10], [12, 14]]), json!([[10.0, 1.0], [13.0, 2.0]])),
    ] {
        assert_eq!(ask(&app, "/embed", json!({"inputs": inputs})).await, rows, "{inputs}");
        assert_eq!(ask(&app, "/tei/m/embed", json!({"inputs": inputs})).await, rows, "{inputs}");
    }
    let unit = ask(&app, "/embed", json!({"inputs": "a b", "normalize": true})).await;
    assert_near(&unit[0], &[6.0 / 52f64.sqrt(), 4.0 / 52f64.sqrt()]);
    assert_eq!(ask(&app, "/embed", json!({"inputs": "a b", "dimensions": 1})).await, json!([[6.0]]));
    let prompted = ask(&app, "/embed", json!({"inputs": "a", "prompt_name": "d"})).await;
    assert_eq!(prompted, json!([[6.5, 4.0]]));
}

#[tokio::test]
async fn long_texts_are_cut_unless_the_request_forbids_it() {
    let app = app(vec![embedder("m")]);
    let long = ["a a a", &"b ".repeat(10)].join(" ");
    let body = |more: Value| {
        let mut body = json!({"inputs": ["a", long]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    // 1 and 2 around the first ten words, or the last ten.
    for (more, sum) in [
        (json!({}), 3.0 + 30.0 + 77.0),
        (json!({"truncate": null}), 110.0),
        (json!({"truncation_direction": "Right"}), 110.0),
        (json!({"truncation_direction": "left"}), 3.0 + 110.0),
    ] {
        assert_near(&ask(&app, "/embed", body(more)).await[1], &[sum / 12.0, 12.0]);
    }
    let (status, kind, text) = failure(&post(&app, "/embed", &body(json!({"truncate": false}))).await);
    assert_eq!((status, &*kind), (422, "Validation"));
    assert!(text.starts_with("inputs[1] has 15 tokens"), "{text}");
}

#[tokio::test]
async fn embed_all_answers_a_row_for_each_token_and_none_for_padding() {
    let app = app_answering(vec![encoder()], ids_themselves);
    let answer = ask(&app, "/embed_all", json!({"inputs": ["a b", "d"]})).await;
    assert_eq!(answer, json!([[[1.0], [10.0], [11.0], [2.0]], [[1.0], [13.0], [2.0]]]));
    // Its vectors for whole texts are pooled: by their mean, as nobody says anything.
    let answer = ask(&app, "/embed", json!({"inputs": ["a b", "d"], "normalize": false})).await;
    assert_near(&answer[0], &[6.0]);
    assert_near(&answer[1], &[16.0 / 3.0]);
}

#[tokio::test]
async fn predict_tells_a_pair_from_a_batch_and_sorts_by_score() {
    let app = app(vec![classifier("m", &["mean", "count"])]);
    let entry = |label: &str, score: f64| json!({"score": score, "label": label});
    let raw = |inputs: Value| json!({"inputs": inputs, "raw_scores": true});
    assert_eq!(ask(&app, "/predict", raw(json!("a b"))).await, json!([entry("mean", 6.0), entry("count", 4.0)]));
    // Its ids are taken down by the frame: [1, 0, 2] around a word that the tokenizer does not know.
    assert_eq!(ask(&app, "/predict", raw(json!(["zz"]))).await, json!([entry("count", 3.0), entry("mean", 1.0)]));
    // [1, 10, 2, 12, 2]
    let pair = json!([entry("mean", 5.4f32.into()), entry("count", 5.0)]);
    let answer = ask(&app, "/predict", raw(json!(["a", "c"]))).await;
    assert_near(&json!([answer[0]["score"], answer[1]["score"]]), &[5.4, 5.0]);
    assert_eq!((&answer[0]["label"], &pair[0]["label"]), (&json!("mean"), &json!("mean")));
    let batch = ask(&app, "/predict", raw(json!([["a b"], ["a", "b"]]))).await;
    assert_eq!(batch[0], json!([entry("mean", 6.0), entry("count", 4.0)]));
    assert_near(&json!([batch[1][0]["score"], batch[1][1]["score"]]), &[5.2, 5.0]);
    // Softmax over 6 and 4.
    let answer = ask(&app, "/predict", json!({"inputs": "a b"})).await;
    let first = 1.0 / (1.0 + (-2f64).exp());
    assert_near(&json!([answer[0]["score"], answer[1]["score"]]), &[first, 1.0 - first]);
}

#[tokio::test]
async fn rerank_sorts_texts_by_their_score_for_the_query() {
    let app = app(vec![classifier("m", &["score"])]);
    // [1, 10, 2, x, 2]: the mean of ids 10 to 13.
    let body = |more: Value| {
        let mut body = json!({"query": "a", "texts": ["b", "d", "a", "d"]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let answer = ask(&app, "/rerank", body(json!({"raw_scores": true, "return_text": true}))).await;
    let order: Vec<_> =
        answer.as_array().unwrap().iter().map(|entry| (entry["index"].clone(), entry["text"].clone())).collect();
    let expected = [(1, "d"), (3, "d"), (0, "b"), (2, "a")].map(|(index, text)| (json!(index), json!(text)));
    assert_eq!(order, expected);
    assert_near(&json!([answer[0]["score"], answer[3]["score"]]), &[5.6, 5.0]);
    let answer = ask(&app, "/rerank", body(json!({}))).await;
    assert_near(&json!([answer[3]["score"]]), &[1.0 / (1.0 + (-5f64).exp())]);
    assert_eq!(answer[0].get("text"), None);
    // One score is a class as well.
    let answer = ask(&app, "/predict", json!({"inputs": "a b", "raw_scores": true})).await;
    assert_eq!(answer, json!([{"score": 6.0, "label": "score"}]));
}

#[tokio::test]
async fn similarity_is_the_cosine_with_the_source() {
    let app = app(vec![embedder("m")]);
    let answer =
        ask(&app, "/similarity", json!({"inputs": {"source_sentence": "a b", "sentences": ["a b", "c"]}})).await;
    assert_near(&answer, &[1.0, 42.0 / (52f64.sqrt() * 34f64.sqrt())]);
    let parameters = json!({"truncate": false});
    let long = "a ".repeat(20);
    let inputs = json!({"source_sentence": "a", "sentences": ["a", long]});
    let (status, _, text) =
        failure(&post(&app, "/similarity", &json!({"inputs": inputs, "parameters": parameters})).await);
    assert_eq!(status, 422);
    assert!(text.starts_with("sentences[1] has 22 tokens"), "{text}");
}

#[tokio::test]
async fn tokens_are_shown_and_turned_back() {
    let app = app(vec![embedder("m")]);
    let token = |id: u32, text: &str, place: Option<(u32, u32)>| {
        json!({"id": id, "text": text, "special": place.is_none(),
               "start": place.map(|place| place.0), "stop": place.map(|place| place.1)})
    };
    let a = token(10, "a", Some((0, 1)));
    let framed = json!([[token(1, "[CLS]", None), a, token(2, "[SEP]", None)]]);
    assert_eq!(ask(&app, "/tokenize", json!({"inputs": "a"})).await, framed);
    let bare = ask(&app, "/tokenize", json!({"inputs": ["a", "é"], "add_special_tokens": false})).await;
    assert_eq!(bare, json!([[a], [token(14, "é", Some((0, 1)))]]));
    assert_eq!(ask(&app, "/decode", json!({"ids": [1, 10, 11, 2]})).await, json!(["a b"]));
    let all = ask(&app, "/decode", json!({"ids": [[1, 10, 2], [14]], "skip_special_tokens": false})).await;
    assert_eq!(all, json!(["[CLS] a [SEP]", "é"]));
}

#[tokio::test]
async fn info_says_what_the_model_is() {
    let app = app(vec![embedder("e"), classifier("c", &["no", "yes"]), classifier("r", &["score"])]);
    let kind = async |name: &str| app.get(&format!("/tei/{name}/info")).await.json()["model_type"].clone();
    assert_eq!(kind("e").await, json!({"embedding": {"pooling": "none"}}));
    assert_eq!(
        kind("c").await,
        json!({"classifier": {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}})
    );
    assert_eq!(kind("r").await, json!({"reranker": {"id2label": {"0": "score"}, "label2id": {"score": 0}}}));
    let info = app.get("/tei/e/info").await.json();
    assert_eq!((&info["max_input_length"], &info["max_client_batch_size"]), (&json!(12), &json!(100)));
    assert_eq!((&info["model_dtype"], &info["auto_truncate"]), (&json!("float32"), &json!(true)));
}

#[tokio::test]
async fn without_a_name_the_only_model_that_can_is_meant() {
    let several = app(vec![embedder("e"), classifier("r", &["score"]), echo("t", vec![tensor("x", DataType::Uint8)])]);
    assert_eq!(ask(&several, "/embed", json!({"inputs": "a b"})).await, json!([[6.0, 4.0]]));
    ask(&several, "/rerank", json!({"query": "a", "texts": ["b"]})).await;
    let two = app(vec![embedder("e"), embedder("f")]);
    let (status, _, text) = failure(&post(&two, "/embed", &json!({"inputs": "a"})).await);
    assert_eq!(status, 404);
    assert!(text.contains("(e, f)") && text.contains("/tei/e/") && text.contains("text.model"), "{text}");
    let chosen = crate::support::app_with(|state| state.texts.model = Some("nothing".to_owned()));
    let (status, _, text) = failure(&post(&chosen, "/embed", &json!({"inputs": "a"})).await);
    assert_eq!((status, text.contains("'nothing'")), (404, true));
}

#[tokio::test]
async fn failures_have_the_kinds_that_clients_know() {
    let app = app(vec![embedder("m"), classifier("c", &["no", "yes"])]);
    let many = vec!["a"; 101];
    for (path, body, status, kind, part) in [
        ("/embed", json!({"inputs": []}), 400, "Empty", "inputs is empty"),
        ("/embed", json!({"inputs": ["a", ""]}), 422, "Validation", "inputs[1] is empty"),
        ("/embed", json!({"inputs": many}), 422, "Validation", "at most 100"),
        ("/embed", json!({"inputs": 5}), 422, "Validation", "inputs: invalid type"),
        ("/embed", json!({}), 422, "Validation", "inputs is missing"),
        ("/embed", json!({"inputs": "a", "dimensions": 3}), 422, "Validation", "dimensions 3"),
        (
            "/embed",
            json!({"inputs": "a", "prompt_name": "x"}),
            422,
            "Validation",
            "prompt_name: the model has no prompt 'x'",
        ),
        ("/embed", json!({"inputs": "a", "truncation_direction": "up"}), 422, "Validation", "neither 'left'"),
        ("/tei/c/embed", json!({"inputs": "a"}), 424, "Backend", "gives no vectors for texts"),
        ("/tei/m/embed_all", json!({"inputs": "a"}), 424, "Backend", "gives no vectors for tokens"),
        ("/tei/m/predict", json!({"inputs": "a"}), 424, "Backend", "is not a classifier"),
        ("/tei/c/rerank", json!({"query": "a", "texts": ["a"]}), 424, "Backend", "is not a reranker"),
        ("/tei/x/embed", json!({"inputs": "a"}), 404, "Validation", "'x' is not known"),
        ("/predict", json!({"inputs": ["a", "b", "c"]}), 422, "Validation", "a pair of texts"),
        ("/tei/m/tokenize", json!({"inputs": [1, 2]}), 422, "Validation", "token ids already"),
        ("/tei/m/decode", json!({"ids": ["a"]}), 422, "Validation", "texts already"),
        ("/similarity", json!({"inputs": {"source_sentence": "a"}}), 422, "Validation", "sentences is missing"),
        ("/similarity", json!({"inputs": "a"}), 422, "Validation", "inputs must be a JSON object"),
        (
            "/similarity",
            json!({"inputs": {"source_sentence": "", "sentences": ["a"]}}),
            422,
            "Validation",
            "source_sentence is",
        ),
        (
            "/similarity",
            json!({"inputs": {"source_sentence": "a", "sentences": []}}),
            400,
            "Empty",
            "sentences is empty",
        ),
    ] {
        let (got, name, text) = failure(&post(&app, path, &body).await);
        assert_eq!((got, &*name), (status, kind), "{path} {body}: {text}");
        assert!(text.contains(part), "{path} {body}: {text}");
    }
    let reranker = self::app(vec![classifier("r", &["score"])]);
    let empty = post(&reranker, "/rerank", &json!({"query": "", "texts": ["a"]})).await;
    assert_eq!(failure(&empty).0, 400);
}

#[tokio::test]
async fn answers_that_are_many_times_as_long_as_their_texts_have_a_limit() {
    let (mut state, server, _jobs) = state(vec![encoder()], 1, None);
    (state.texts.max_inputs, state.texts.max_input_bytes, state.limits.body_bytes) = (2000, 1 << 20, 4 << 20);
    state.bodies = Bodies::new(8 << 20);
    let app = App { router: router(Arc::new(state)), models: server.models, phase: server.phase };
    // 12 tokens each; 1365 of them would do. The model is not asked: nobody would answer.
    let many = vec!["a ".repeat(10); 1366];
    let words = "a ".repeat(400_000);
    for (path, body, part) in [
        (
            "/embed_all",
            json!({"inputs": many}),
            "inputs have 16392 tokens, each of which has a vector; send at most 16384",
        ),
        ("/tokenize", json!({"inputs": words}), "inputs would be answered with more than 25165824 bytes"),
        ("/tokenize", json!({"inputs": vec!["a ".repeat(4500); 100]}), "inputs would be answered with more than"),
    ] {
        let (status, kind, text) = failure(&post(&app, path, &body).await);
        assert_eq!((status, &*kind), (422, "Validation"), "{path}: {text}");
        assert!(text.contains(part), "{path}: {text}");
    }
    let tokens = post(&app, "/tokenize", &json!({"inputs": "a ".repeat(40_000)})).await;
    assert_eq!((tokens.status.as_u16(), tokens.json()[0].as_array().unwrap().len()), (200, 40_002));
}

/// A good request of each route.
const GOOD: [(&str, &str); 9] = [
    ("/v1/embeddings", r#"{"input": ["a b", "c"], "model": "e", "encoding_format": "base64", "dimensions": 1}"#),
    ("/tei/e/embed", r#"{"inputs": [[10, 11], [12]], "truncate": true, "normalize": false, "dimensions": 2}"#),
    (
        "/tei/e/similarity",
        r#"{"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": {"truncate": null}}"#,
    ),
    ("/tei/e/tokenize", r#"{"inputs": ["a", "b"], "add_special_tokens": false}"#),
    ("/tei/e/decode", r#"{"ids": [[1, 10], [2]], "skip_special_tokens": true}"#),
    ("/tei/r/rerank", r#"{"query": "a", "texts": ["b", "c"], "raw_scores": true, "return_text": true}"#),
    ("/tei/r/predict", r#"{"inputs": [["a"], ["b", "c"]], "raw_scores": false}"#),
    ("/tei/r/predict", r#"{"inputs": ["a", "b"], "truncation_direction": "left"}"#),
    ("/tei/e/embed", r#"{"inputs": "a \ud83d\ude00 b", "prompt_name": "d"}"#),
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever becomes of a good request on its way, it has an answer, and an error has its form.
    #[test]
    fn damage_is_answered_in_the_form_of_its_route(
        which in 0..GOOD.len(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..5),
        cut in any::<prop::sample::Index>(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let app = app(vec![embedder("e"), classifier("r", &["score"])]);
            let (path, good) = GOOD[which];
            let mut body = good.as_bytes().to_vec();
            let whole = damage.is_empty();
            for (index, byte) in damage {
                let index = index.index(body.len());
                body[index] = byte;
            }
            if !whole {
                body.truncate(body.len() - cut.index(body.len().min(9)));
            }
            let reply = app.send(Request::post(path).body(Body::from(body.clone())).unwrap()).await;
            let (status, json) = (reply.status.as_u16(), reply.json());
            let shown = String::from_utf8_lossy(&body);
            assert!(matches!(status, 200 | 400 | 404 | 422) && (status == 200 || !whole), "{status} {shown} {json}");
            if status != 200 {
                let text = if path == "/v1/embeddings" { &json["error"]["message"] } else { &json["error"] };
                assert!(text.is_string(), "{shown} {json}");
            }
        });
    }
}
