//! Failures as gRPC has them: a status, the stable word for the kind of failure, and when to try again.

use crate::http::{ApiError, Code};
use tonic::metadata::MetadataValue;
use tonic::{Code as Grpc, Status};

/// The metadata that holds the word that HTTP has as `code`.
const ERROR_CODE: &str = "error-code";
/// Seconds after which it is worth trying again, as in HTTP.
const RETRY_AFTER: &str = "retry-after";

/// The status for a failure. What may be tried again as it is has UNAVAILABLE: that is what clients retry by themselves.
pub(super) fn status(error: &ApiError) -> Status {
    error.log();
    let code = error.code();
    let mut status = Status::new(grpc(code), error.to_string());
    status.metadata_mut().insert(ERROR_CODE, MetadataValue::from_static(code.as_str()));
    if let Some(after) = error.retry_after() {
        status.metadata_mut().insert(RETRY_AFTER, after.into());
    }
    status
}

fn grpc(code: Code) -> Grpc {
    match code {
        Code::InvalidRequest => Grpc::InvalidArgument,
        Code::ModelNotFound | Code::NotFound => Grpc::NotFound,
        Code::BodyTooLarge | Code::RequestTooLarge => Grpc::ResourceExhausted,
        Code::MethodNotAllowed | Code::UnsupportedEncoding | Code::Unsupported => Grpc::Unimplemented,
        Code::Overloaded | Code::Unavailable | Code::DeviceMemoryExhausted => Grpc::Unavailable,
        Code::BodyTimeout | Code::DeadlineExceeded => Grpc::DeadlineExceeded,
        Code::LoadFailed => Grpc::FailedPrecondition,
        Code::Unauthorized => Grpc::Unauthenticated,
        Code::Forbidden => Grpc::PermissionDenied,
        Code::DeviceError | Code::Internal => Grpc::Internal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batcher::{InferError, Rejection};
    use std::time::Duration;

    #[test]
    fn a_status_has_the_word_and_the_time_that_http_has() {
        let after = Duration::from_millis(2500);
        let full = ApiError::Infer(InferError::Rejected(Rejection::QueueFull { retry_after: after }));
        let status = status(&full);
        assert_eq!(status.code(), Grpc::Unavailable);
        let metadata = |key: &str| status.metadata().get(key).and_then(|value| value.to_str().ok().map(str::to_owned));
        assert_eq!(metadata(ERROR_CODE).as_deref(), Some("overloaded"));
        assert_eq!(metadata(RETRY_AFTER).as_deref(), Some("3"));
        assert_eq!(status.message(), full.to_string());
    }

    #[test]
    fn every_code_has_a_status_that_is_not_ok_or_unknown() {
        for code in Code::ALL {
            assert!(![Grpc::Ok, Grpc::Unknown].contains(&grpc(code)), "{code:?}");
        }
    }
}
