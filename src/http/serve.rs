//! The accept loop: HTTP/1.1 and HTTP/2 (prior knowledge) on one socket, within limits, until told to stop.

use super::eager::Eager;
use super::{Phase, Tls, stall};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::Version;
use axum::response::Response;
use http_body::{Body as _, Frame, SizeHint};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tokio_io_timeout::TimeoutStream;

/// How long to wait after an accept that failed for want of something (file descriptors, memory).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How long idle connections and the listener live on after the order to close. Requests that come in this time are served,
/// and their connections closed behind the answer.
const LINGER: Duration = Duration::from_millis(250);

/// Answers that may begin on one connection before it takes note of them.
const BEGUN: usize = 16;

/// What connections may cost.
#[derive(Clone, Debug, PartialEq)]
pub struct ServeLimits {
    /// The most open connections; more wait in the listener's backlog.
    pub connections: usize,
    /// The most requests that one HTTP/2 connection may have open.
    pub streams_per_connection: u32,
    /// How long a connection may be without a request while there is no room for another one; it is closed then.
    pub crowded_idle_timeout: Duration,
    /// How long a client may take to send the head of a request. A connection without a request is closed after the same time;
    /// one of HTTP/2 after its first request is pinged as often instead, and closed if no answer comes within the same time.
    pub header_read_timeout: Duration,
    /// How long a connection may take to accept further bytes of an answer; then it is closed. One of HTTP/2 that grants an
    /// answer no window is closed within twice the time.
    pub write_timeout: Duration,
    /// The most bytes in the head of a request; at least 8192. Also bounds what is read or written in one go.
    pub header_bytes: usize,
    /// How long connections may take to finish once the server is closing.
    pub grace: Duration,
}

/// Serves, over TLS if there is any, until `phase` is [`Phase::Closing`]; then, a quarter of a second later, stops accepting and closes idle connections,
/// and the others after the request that they carry. Returns when all are closed, or after the grace period, which cuts the rest off.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    limits: ServeLimits,
    tls: Option<Tls>,
    mut phase: watch::Receiver<Phase>,
) {
    let (crowded, crowd) = watch::channel(false);
    let template = Template { server: Arc::new(builder(&limits)), router, tls, phase: phase.clone(), crowd };
    let mut connections = JoinSet::new();
    let mut accept = Accept { listener, template, limits: &limits, crowded };
    tokio::select! {
        biased;
        () = closing(&mut phase) => {}
        () = accept.run(&mut connections) => {}
    }
    // Clients that were connecting as the order came are served like all before them.
    let _over = tokio::time::timeout(LINGER, accept.run(&mut connections)).await;
    let Accept { listener, crowded: _crowded, .. } = accept;
    drop(listener);
    let all = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(limits.grace, all).await.is_err() {
        tracing::warn!(connections = connections.len(), "cutting connections off at the end of the grace period");
        connections.shutdown().await;
    }
}

/// What takes connections in.
struct Accept<'a> {
    listener: TcpListener,
    template: Template,
    limits: &'a ServeLimits,
    crowded: watch::Sender<bool>,
}

impl Accept<'_> {
    /// Accepts as long as it is polled, never more than may be open.
    async fn run(&mut self, connections: &mut JoinSet<()>) {
        loop {
            let room = connections.len() < self.limits.connections;
            self.crowded.send_if_modified(|crowded| std::mem::replace(crowded, !room) == room);
            tokio::select! {
                biased;
                Some(_) = connections.join_next() => {}
                accepted = self.listener.accept(), if room => match accepted {
                    Ok((stream, _)) => {
                        connections.spawn(self.template.connection(self.limits).run(stream));
                    }
                    Err(error) => pause_after(&error).await,
                },
            }
        }
    }
}

/// What all connections have in common.
struct Template {
    server: Arc<auto::Builder<TokioExecutor>>,
    router: Router,
    tls: Option<Tls>,
    phase: watch::Receiver<Phase>,
    crowd: watch::Receiver<bool>,
}

impl Template {
    fn connection(&self, limits: &ServeLimits) -> Connection {
        Connection {
            server: Arc::clone(&self.server),
            router: self.router.clone(),
            tls: self.tls.clone(),
            first_request_within: limits.header_read_timeout,
            crowded_idle_timeout: limits.crowded_idle_timeout,
            write_timeout: limits.write_timeout,
            streams: limits.streams_per_connection as usize,
            phase: self.phase.clone(),
            crowd: self.crowd.clone(),
        }
    }
}

/// Waits for the order to close, and then as long as a request that was under way as it came may take to arrive.
async fn lingered(phase: &mut watch::Receiver<Phase>) {
    closing(phase).await;
    tokio::time::sleep(LINGER).await;
}

/// Waits for the order to close; a sender that is gone counts as one.
async fn closing(phase: &mut watch::Receiver<Phase>) {
    let _gone = phase.wait_for(|phase| *phase == Phase::Closing).await;
}

/// A client that left between its SYN and our accept is its own affair; a want of resources passes, if given time.
async fn pause_after(error: &io::Error) {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    if !matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset) {
        tracing::warn!(%error, "accepting a connection failed");
        tokio::time::sleep(ACCEPT_PAUSE).await;
    }
}

fn builder(limits: &ServeLimits) -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_read_timeout)
        // Also how much is read in one go: there is no way through this builder to bound a head by less. A lonely request of 602 KB is
        // answered a fifth sooner with pieces of 64 KiB than of 32, and hardly sooner with larger ones, of which the last stays with
        // a connection that idles behind a large body.
        .max_buf_size(limits.header_bytes.max(8192));
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(limits.streams_per_connection)
        .max_header_list_size(u32::try_from(limits.header_bytes).unwrap_or(u32::MAX))
        // A peer that has vanished without a word is found out by pings.
        .keep_alive_interval(limits.header_read_timeout)
        .keep_alive_timeout(limits.header_read_timeout);
    builder
}

/// The requests of one connection.
#[derive(Default)]
struct Requests {
    begun: AtomicUsize,
    ended: AtomicUsize,
}

/// One request, until its answer has been handed to the socket.
struct Open(Arc<Requests>);

impl Open {
    fn new(requests: &Arc<Requests>) -> Self {
        requests.begun.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(requests))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::Relaxed);
    }
}

/// The body of an answer, with its request. What a connection still has to write is not out of the body's sight: the last of
/// it takes the request along.
struct Answer {
    body: Body,
    open: Option<Open>,
}

impl Answer {
    fn of(response: Response, open: Open) -> Response {
        if response.body().is_end_stream() {
            response
        } else {
            response.map(|body| Body::new(Self { body, open: Some(open) }))
        }
    }
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        let last = self.body.is_end_stream();
        Poll::Ready(match frame {
            Some(Ok(frame)) if last => Some(Ok(match self.open.take() {
                Some(open) => frame.map_data(|bytes| Bytes::from_owner(Last { bytes, _open: open })),
                None => frame,
            })),
            other => other,
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The last bytes of an answer.
struct Last {
    bytes: Bytes,
    _open: Open,
}

impl AsRef<[u8]> for Last {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Requests {
    fn any(&self) -> bool {
        self.begun.load(Ordering::Relaxed) > 0
    }

    /// Waits until there is no room for another connection and none of these has been open for a while.
    async fn idle_in_a_crowd(&self, mut crowd: watch::Receiver<bool>, idle: Duration) {
        loop {
            if crowd.wait_for(|crowded| *crowded).await.is_err() {
                std::future::pending::<()>().await;
            }
            let begun = self.begun.load(Ordering::Relaxed);
            tokio::time::sleep(idle).await;
            // In this order: what begins in between makes the numbers differ.
            let ended = self.ended.load(Ordering::Relaxed);
            if *crowd.borrow() && ended == begun && self.begun.load(Ordering::Relaxed) == begun {
                return;
            }
        }
    }
}

struct Connection {
    server: Arc<auto::Builder<TokioExecutor>>,
    router: Router,
    tls: Option<Tls>,
    first_request_within: Duration,
    crowded_idle_timeout: Duration,
    write_timeout: Duration,
    streams: usize,
    phase: watch::Receiver<Phase>,
    crowd: watch::Receiver<bool>,
}

impl Connection {
    async fn run(self, stream: TcpStream) {
        // Head and body of a response may be two writes: without this the second waits for an acknowledgement.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "the connection cannot do without Nagle's algorithm");
        }
        let Some(tls) = &self.tls else { return self.speak(stream).await };
        let nothing = Requests::default();
        tokio::select! {
            shaken = tokio::time::timeout(self.first_request_within, tls.acceptor().accept(stream)) => match shaken {
                Ok(Ok(stream)) => self.speak(stream).await,
                Ok(Err(error)) => tracing::debug!(%error, "no TLS"),
                Err(_) => {}
            },
            () = nothing.idle_in_a_crowd(self.crowd.clone(), self.crowded_idle_timeout) => {}
        }
    }

    async fn speak(mut self, stream: impl AsyncRead + AsyncWrite + Send + 'static) {
        let requests = Arc::new(Requests::default());
        let seen = Arc::clone(&requests);
        let router = self.router;
        let (begun, mut begins) = mpsc::channel(BEGUN);
        let service = tower::service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
            let open = Open::new(&seen);
            let (multiplexed, begun) = (request.version() == Version::HTTP_2, begun.clone());
            let response = tower::ServiceExt::oneshot(router.clone(), request);
            async move {
                let Ok(response) = response.await;
                let response = if multiplexed { stall::watch(response, &begun).await } else { response };
                Ok::<_, Infallible>(Answer::of(response, open))
            }
        });
        // A client that does not read must not hold its connection, and the answer in it, for ever.
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(self.write_timeout));
        let connection =
            self.server.serve_connection(TokioIo::new(Box::pin(stream)), TowerToHyperService::new(service));
        let mut connection = std::pin::pin!(connection);
        let eager = Eager::new();
        // hyper's own timeout begins only once it knows which version the client speaks.
        let mut first = std::pin::pin!(tokio::time::sleep(self.first_request_within));
        // These two go on while the connection has other things to do; begun anew with each of them they would never end.
        let mut lingered = std::pin::pin!(lingered(&mut self.phase));
        let idle = || requests.idle_in_a_crowd(self.crowd.clone(), self.crowded_idle_timeout);
        let mut crowded_out = std::pin::pin!(idle());
        let (mut waiting, mut open, mut wanted) = (true, true, true);
        let mut bodies = stall::Open::new(self.streams);
        let mut look = tokio::time::interval(self.write_timeout);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                ended = std::future::poll_fn(|cx| eager.poll(connection.as_mut(), cx)) => {
                    if let Err(error) = ended {
                        tracing::debug!(error, "connection ended");
                    }
                    return;
                }
                () = lingered.as_mut(), if open => {
                    open = false;
                    connection.as_mut().graceful_shutdown();
                }
                Some(body) = begins.recv() => bodies.add(body),
                _ = look.tick(), if bodies.any() => {
                    if bodies.any_stalls() {
                        tracing::debug!("a client takes nothing of an answer: its connection is closed");
                        return;
                    }
                }
                () = first.as_mut(), if waiting => {
                    waiting = false;
                    if !requests.any() {
                        return;
                    }
                }
                () = crowded_out.as_mut() => {
                    // First with good manners, then without: the head of a request may have come half.
                    if !std::mem::replace(&mut wanted, false) {
                        return;
                    }
                    connection.as_mut().graceful_shutdown();
                    crowded_out.set(idle());
                }
            }
        }
    }
}
