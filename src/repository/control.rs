//! The handle for loading and unloading models while others serve.

use super::manager::Command;
use crate::model::config;
use tokio::sync::{mpsc, oneshot};

/// Requests to load or unload that may wait for the one that is carried out.
pub(super) const MAX_COMMANDS: usize = 16;

/// Loads and unloads models on request; cheap to clone. Every protocol uses the same.
#[derive(Clone, Debug)]
pub struct Controller {
    commands: mpsc::Sender<Command>,
}

/// Why a model was not loaded or unloaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// There is no such model in the repository.
    #[error("model '{0}' is not in the repository")]
    Unknown(String),
    /// The request asks for what cannot be.
    #[error("{0}")]
    Invalid(String),
    /// It was tried and did not work.
    #[error("failed to load '{model}': {reason}")]
    Failed {
        /// The model.
        model: String,
        /// Why, fit for clients.
        reason: String,
    },
    /// As many requests as may wait do so.
    #[error("{MAX_COMMANDS} requests to load or unload wait already; try again later")]
    Busy,
    /// The server is ending.
    #[error("the server is shutting down")]
    Closed,
}

impl Controller {
    /// A handle, and where its requests arrive.
    pub(super) fn new() -> (Self, mpsc::Receiver<Command>) {
        let (commands, receiver) = mpsc::channel(MAX_COMMANDS);
        (Self { commands }, receiver)
    }

    /// Loads a model as it is in the repository now, or loads it again, and answers when it serves. What served before goes
    /// on until then, and also if this fails. `parameters` are those of the request: `config` may hold a model configuration
    /// in Triton's words, which holds until the model is loaded without one.
    ///
    /// # Errors
    /// See [`Refused`].
    pub async fn load<'a>(
        &self,
        model: &str,
        parameters: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<(), Refused> {
        let mut sent = Vec::new();
        for (name, value) in parameters {
            match name {
                "config" => sent = config::sent(model, value).map_err(Refused::Invalid)?,
                file if file.starts_with("file:") => {
                    let text = "files come from the server's repository only, never from a request";
                    return Err(Refused::Invalid(format!("parameters.{file}: {text}")));
                }
                other => return Err(Refused::Invalid(format!("parameters.{other} is not known; 'config' is"))),
            }
        }
        let model = model.to_owned();
        self.ask(|reply| Command::Load { model, sent, reply }).await
    }

    /// Takes a model out of service: new requests are refused from now on, those that are inside end as ever. Answers at
    /// once.
    ///
    /// # Errors
    /// See [`Refused`].
    pub async fn unload(&self, model: &str) -> Result<(), Refused> {
        let model = model.to_owned();
        self.ask(|reply| Command::Unload { model, reply }).await
    }

    async fn ask(&self, command: impl FnOnce(oneshot::Sender<Result<(), Refused>>) -> Command) -> Result<(), Refused> {
        let (reply, answer) = oneshot::channel();
        self.commands.try_send(command(reply)).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => Refused::Busy,
            mpsc::error::TrySendError::Closed(_) => Refused::Closed,
        })?;
        answer.await.unwrap_or(Err(Refused::Closed))
    }
}
