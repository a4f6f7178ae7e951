//! Over a real socket: what the router alone cannot show.

use crate::support::{App, app_with_jobs, echo, give_back, tensor};
use concertina::batcher::Jobs;
use concertina::http::Phase;
use concertina::http::serve::{ServeLimits, serve};
use concertina::tensor::{DataType, Tensor};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

struct Server {
    app: App,
    jobs: Jobs,
    address: SocketAddr,
    task: JoinHandle<()>,
}

pub(crate) fn limits() -> ServeLimits {
    ServeLimits {
        connections: 2,
        streams_per_connection: 10,
        header_read_timeout: Duration::from_secs(60),
        write_timeout: Duration::from_secs(60),
        crowded_idle_timeout: Duration::from_secs(60),
        header_bytes: 65536,
        grace: Duration::from_secs(60),
    }
}

async fn start(limits: ServeLimits) -> Server {
    let (app, jobs) = app_with_jobs(vec![echo("m", vec![tensor("x", DataType::Uint8)])], 4);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let task = tokio::spawn(serve(listener, app.router.clone(), limits, None, app.phase.subscribe()));
    Server { app, jobs, address, task }
}

impl Server {
    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }
}

const BODY: &str = r#"{"inputs":[{"name":"x","shape":[1,1],"datatype":"UINT8","data":[7]}]}"#;

fn infer(body: &str) -> Vec<u8> {
    format!("POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// Reads one response: its head in lower case, and its body.
pub(crate) async fn read_response(stream: &mut (impl AsyncRead + Unpin)) -> (String, Vec<u8>) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    let head = String::from_utf8(head).unwrap().to_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).map_or(0, |n| n.parse().unwrap());
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.unwrap();
    (head, body)
}

async fn at_end(stream: &mut TcpStream) -> bool {
    matches!(stream.read(&mut [0; 16]).await, Ok(0) | Err(_))
}

#[tokio::test]
async fn a_connection_lives_on_after_errors() {
    let mut server = start(limits()).await;
    let mut stream = server.connect().await;
    for request in [infer("{"), infer(BODY).replace_path("/v2/models/n/infer"), infer(BODY).replace_path("/nothing")] {
        stream.write_all(&request).await.unwrap();
        let (head, body) = read_response(&mut stream).await;
        assert!(head.starts_with("http/1.1 4"), "{head}");
        assert!(!head.contains("connection: close"), "{head}");
        assert!(!body.is_empty());
    }
    stream.write_all(&infer(BODY)).await.unwrap();
    let job = server.jobs.recv().await.unwrap();
    job.reply.send(give_back(&job.request)).unwrap();
    assert!(read_response(&mut stream).await.0.starts_with("http/1.1 200"));
}

#[tokio::test]
async fn an_answer_that_ends_the_connection_says_so() {
    let server = start(limits()).await;
    for (line, length, status) in [
        ("POST /v2/models/m/infer", 1 << 30, "413"),
        ("POST /v2/health/live", 1 << 20, "405"),
        ("GET /v2/health/live", 1 << 20, "200"),
        ("POST /nothing", 1 << 20, "404"),
    ] {
        let mut stream = server.connect().await;
        let head = format!("{line} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let (head, _) = read_response(&mut stream).await;
        assert!(head.starts_with(&format!("http/1.1 {status}")), "{head}");
        assert!(head.contains("connection: close"), "{line}: {head}");
        assert!(at_end(&mut stream).await, "{line}");
    }
}

#[tokio::test]
async fn a_small_body_that_nobody_wants_is_read_and_the_connection_lives_on() {
    let server = start(limits()).await;
    let mut stream = server.connect().await;
    for body in ["Content-Length: 5\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n5\r\n"] {
        let head = format!("POST /v2/health/live HTTP/1.1\r\nHost: x\r\n{body}");
        stream.write_all(head.as_bytes()).await.unwrap();
        let rest = if body.starts_with('T') { "12345\r\n0\r\n\r\n" } else { "12345" };
        stream.write_all(rest.as_bytes()).await.unwrap();
        let (head, _) = read_response(&mut stream).await;
        assert!(head.starts_with("http/1.1 405") && !head.contains("connection: close"), "{head}");
    }
}

trait ReplacePath {
    fn replace_path(self, path: &str) -> Vec<u8>;
}

impl ReplacePath for Vec<u8> {
    fn replace_path(self, path: &str) -> Vec<u8> {
        String::from_utf8(self).unwrap().replace("/v2/models/m/infer", path).into_bytes()
    }
}

#[tokio::test]
async fn a_client_that_goes_cancels_its_request() {
    let mut server = start(limits()).await;
    let mut stream = server.connect().await;
    stream.write_all(&infer(BODY)).await.unwrap();
    let mut job = server.jobs.recv().await.unwrap();
    assert!(!job.reply.is_closed());
    drop(stream);
    job.reply.closed().await;
}

#[tokio::test]
async fn large_bodies_wait_for_a_word() {
    let server = start(limits()).await;
    let mut stream = server.connect().await;
    let head = "POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    assert!(read_response(&mut stream).await.0.starts_with("http/1.1 100 "));
    stream.write_all(b"{").await.unwrap();
    assert!(read_response(&mut stream).await.0.starts_with("http/1.1 400 "));
}

#[tokio::test]
async fn closing_ends_idle_connections_at_once_and_busy_ones_after_their_answer() {
    let mut server = start(limits()).await;
    let (mut idle, mut busy) = (server.connect().await, server.connect().await);
    idle.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    assert!(read_response(&mut idle).await.0.starts_with("http/1.1 200"));
    busy.write_all(&infer(BODY)).await.unwrap();
    let job = server.jobs.recv().await.unwrap();
    server.app.phase.send_replace(Phase::Closing);
    assert!(at_end(&mut idle).await);
    assert!(TcpStream::connect(server.address).await.is_err(), "the listener is closed");
    job.reply.send(give_back(&job.request)).unwrap();
    let (head, _) = read_response(&mut busy).await;
    assert!(head.contains("connection: close"), "{head}");
    assert!(at_end(&mut busy).await);
    server.task.await.unwrap();
}

#[tokio::test]
async fn the_grace_period_has_an_end() {
    let mut server = start(ServeLimits { grace: Duration::from_millis(1), ..limits() }).await;
    let mut stream = server.connect().await;
    stream.write_all(&infer(BODY)).await.unwrap();
    let mut job = server.jobs.recv().await.unwrap();
    server.app.phase.send_replace(Phase::Closing);
    server.task.await.unwrap();
    job.reply.closed().await;
    assert!(at_end(&mut stream).await);
}

#[tokio::test]
async fn connections_beyond_the_limit_wait() {
    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";
    let server = start(ServeLimits { connections: 1, ..limits() }).await;
    let mut first = server.connect().await;
    first.write_all(REQUEST).await.unwrap();
    read_response(&mut first).await;
    let mut second = server.connect().await;
    second.write_all(REQUEST).await.unwrap();
    // The server has come round to its listener several times when these are answered.
    for _ in 0..10 {
        first.write_all(REQUEST).await.unwrap();
        read_response(&mut first).await;
    }
    assert!(second.try_read(&mut [0; 16]).is_err(), "the second is served while the first is open");
    drop(first);
    assert!(read_response(&mut second).await.0.starts_with("http/1.1 200"));
}

#[tokio::test]
async fn closing_lets_no_more_connections_in_than_ever() {
    let mut server = start(ServeLimits { connections: 1, ..limits() }).await;
    let mut first = server.connect().await;
    first.write_all(&infer(BODY)).await.unwrap();
    let job = server.jobs.recv().await.unwrap();
    server.app.phase.send(Phase::Closing).unwrap();
    let mut second = server.connect().await;
    second.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    assert!(at_end(&mut second).await, "it is not served while the first is open");
    job.reply.send(give_back(&job.request)).unwrap();
    assert!(read_response(&mut first).await.0.starts_with("http/1.1 200"));
    server.task.await.unwrap();
}

#[tokio::test]
async fn connections_without_a_request_make_room_for_others() {
    let limits = ServeLimits { connections: 3, crowded_idle_timeout: Duration::from_millis(50), ..limits() };
    let mut server = start(limits).await;
    let (mut idle, mut half, mut busy) = (server.connect().await, server.connect().await, server.connect().await);
    idle.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    read_response(&mut idle).await;
    half.write_all(b"GET / HTTP/1.1\r\nHo").await.unwrap();
    busy.write_all(&infer(BODY)).await.unwrap();
    let job = server.jobs.recv().await.unwrap();
    let mut late = server.connect().await;
    late.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    assert!(read_response(&mut late).await.0.starts_with("http/1.1 200"));
    assert!(at_end(&mut idle).await || at_end(&mut half).await);
    job.reply.send(give_back(&job.request)).unwrap();
    assert!(read_response(&mut busy).await.0.starts_with("http/1.1 200"), "what carries a request stays");
}

#[tokio::test]
async fn a_connection_that_is_still_taking_its_answer_is_not_without_a_request() {
    // More than the buffers of both sockets hold.
    const SIZE: usize = 16 << 20;
    let limits = ServeLimits { connections: 2, crowded_idle_timeout: Duration::from_millis(20), ..limits() };
    let mut server = start(limits).await;
    let mut slow = server.connect().await;
    slow.write_all(&infer(BODY)).await.unwrap();
    let job = server.jobs.recv().await.unwrap();
    let mut answer = give_back(&job.request).unwrap();
    answer.outputs[0].tensor =
        Tensor { datatype: DataType::Uint8, shape: [1, SIZE][..].into(), data: vec![7; SIZE].into() };
    job.reply.send(Ok(answer)).unwrap();
    let mut first = [0; 12];
    slow.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 200");
    // Each of these has room only when the one before it has been closed for being idle, which takes its time.
    let mut others = Vec::new();
    for _ in 0..10 {
        let mut other = server.connect().await;
        other.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        assert!(read_response(&mut other).await.0.starts_with("http/1.1 200"));
        others.push(other);
    }
    assert!(read_response(&mut slow).await.1.len() > SIZE, "the answer came whole");
}

#[tokio::test]
async fn large_tensors_travel_whole_and_are_not_joined() {
    let mut server = start(limits()).await;
    let mut stream = server.connect().await;
    let tensor: Vec<u8> = (0..1_000_000u32).map(|n| (n % 251) as u8).collect();
    let head = format!(
        "POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: 0\r\nContent-Length: {}\r\n\r\n",
        tensor.len()
    );
    let server_side = async {
        let job = server.jobs.recv().await.unwrap();
        assert!(job.request.inputs[0].data.iter().len() > 1, "the body came in frames and stayed so");
        job.reply.send(give_back(&job.request)).unwrap();
    };
    let client_side = async {
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(&tensor).await.unwrap();
        read_response(&mut stream).await
    };
    let ((), (head, body)) = tokio::join!(server_side, client_side);
    assert!(head.starts_with("http/1.1 200"), "{head}");
    assert!(body.ends_with(&tensor));
}

#[tokio::test]
async fn a_client_that_does_not_read_gives_its_connection_up() {
    // More than the buffers of both sockets hold.
    const SIZE: usize = 16 << 20;
    let mut server = start(ServeLimits { connections: 1, write_timeout: Duration::from_millis(50), ..limits() }).await;
    let mut deaf = server.connect().await;
    deaf.write_all(&infer(BODY)).await.unwrap();
    let job = server.jobs.recv().await.unwrap();
    let mut answer = give_back(&job.request).unwrap();
    answer.outputs[0].tensor =
        Tensor { datatype: DataType::Uint8, shape: [1, SIZE][..].into(), data: vec![7; SIZE].into() };
    job.reply.send(Ok(answer)).unwrap();
    let mut second = server.connect().await;
    second.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    let answered = tokio::time::timeout(Duration::from_secs(60), read_response(&mut second)).await;
    assert!(answered.expect("the first connection is given up").0.starts_with("http/1.1 200"));
    drop(deaf);
}

#[tokio::test]
async fn silent_connections_are_closed() {
    let server = start(ServeLimits { header_read_timeout: Duration::from_millis(10), ..limits() }).await;
    for sent in [&b""[..], b"PRI * HT", b"GET / HTTP/1.1\r\nHo"] {
        let mut stream = server.connect().await;
        stream.write_all(sent).await.unwrap();
        while !at_end(&mut stream).await {}
    }
}

#[tokio::test]
async fn http2_with_prior_knowledge() {
    let server = start(limits()).await;
    let mut stream = server.connect().await;
    // Preface, empty SETTINGS, and HEADERS of stream 1: GET, http, /, authority x.
    let mut request = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
    request.extend_from_slice(b"\0\0\x06\x01\x05\0\0\0\x01\x82\x86\x84\x41\x01x");
    stream.write_all(&request).await.unwrap();
    loop {
        let mut frame = [0; 9];
        stream.read_exact(&mut frame).await.unwrap();
        let mut payload = vec![0; usize::from(u16::from_be_bytes([frame[1], frame[2]]))];
        stream.read_exact(&mut payload).await.unwrap();
        if frame[3] == 1 {
            assert_eq!(payload[0], 0x88, "status 200 of the static table");
            break;
        }
    }
}

#[tokio::test]
async fn an_http2_connection_without_requests_lives_as_long_as_it_answers_pings() {
    const PING: u8 = 6;
    let server = start(ServeLimits { header_read_timeout: Duration::from_millis(50), ..limits() }).await;
    let mut stream = server.connect().await;
    let get = |stream: u8| [b"\0\0\x06\x01\x05\0\0\0".as_slice(), &[stream], b"\x82\x86\x84\x41\x01x"].concat();
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    for (request, pings) in [(1, 5), (3, 5), (5, 0)] {
        stream.write_all(&get(request)).await.unwrap();
        let (mut answered, mut seen) = (false, 0);
        while !answered || seen < pings {
            let mut frame = [0; 9];
            stream.read_exact(&mut frame).await.unwrap();
            let mut payload = vec![0; usize::from(u16::from_be_bytes([frame[1], frame[2]]))];
            stream.read_exact(&mut payload).await.unwrap();
            if frame[3] == 1 {
                assert_eq!((frame[8], payload[0]), (request, 0x88), "status 200 of the static table");
                answered = true;
            }
            if frame[3] == PING && frame[4] == 0 {
                stream.write_all(&[b"\0\0\x08\x06\x01\0\0\0\0".as_slice(), &payload].concat()).await.unwrap();
                seen += 1;
            }
        }
    }
    while !at_end(&mut stream).await {}
}

#[tokio::test]
async fn a_busy_http2_connection_is_told_that_the_server_closes() {
    const GOAWAY: u8 = 7;
    const HEADERS: u8 = 1;
    let server = start(limits()).await;
    let mut stream = server.connect().await;
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    server.app.phase.send_replace(Phase::Closing);
    // One request after the other, without a pause, as long as the server may need to say it.
    let told = async {
        for id in (1u32..).step_by(2) {
            // Room for another hundred bytes of answers on the connection, and the request.
            let mut request = b"\0\0\x04\x08\0\0\0\0\0\0\0\0\x64\0\0\x06\x01\x05".to_vec();
            request.extend_from_slice(&id.to_be_bytes());
            request.extend_from_slice(b"\x82\x86\x84\x41\x01x");
            stream.write_all(&request).await.unwrap();
            let mut kind = 0;
            while kind != HEADERS {
                let mut frame = [0; 9];
                stream.read_exact(&mut frame).await.unwrap();
                let mut payload = vec![0; usize::from(u16::from_be_bytes([frame[1], frame[2]]))];
                stream.read_exact(&mut payload).await.unwrap();
                kind = frame[3];
                if kind == GOAWAY {
                    return;
                }
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(20), told).await.expect("GOAWAY, although there is always a request");
}

#[tokio::test]
async fn a_client_that_grants_no_window_gives_its_connection_up() {
    let server = start(ServeLimits { write_timeout: Duration::from_millis(50), ..limits() }).await;
    // As above, but with SETTINGS whose initial window is zero: no byte of any answer may be sent.
    let mut request = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\x06\x04\0\0\0\0\0\0\x04\0\0\0\0".to_vec();
    request.extend_from_slice(b"\0\0\x06\x01\x05\0\0\0\x01\x82\x86\x84\x41\x01x");
    let mut stream = server.connect().await;
    stream.write_all(&request).await.unwrap();
    let reading = async { while !at_end(&mut stream).await {} };
    tokio::time::timeout(Duration::from_secs(60), reading).await.expect("the connection is given up");
}
