//! The handlers that the binary brings along: an echo for trials and load tests, and the way to an agent of one's own
//! behind HTTP. Both implement the same port as a handler that links this crate.

use std::net::SocketAddr;

use shared::{admin::Router, settings::HandlerSettings};

use crate::{
    handler::{HandlerError, Reply, Turn, TurnHandler},
    operations_api::{NoAddress, OperationsApi},
};

mod echo;
mod http;

pub use echo::EchoHandler;
pub use http::{HttpHandler, HttpSetupError};

/// The chosen handler cannot work as it is set up.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// The agent could not call back.
    #[error(transparent)]
    NoAddress(#[from] NoAddress),
    /// No requests can be made.
    #[error(transparent)]
    Http(#[from] HttpSetupError),
}

/// The handler that the settings chose.
#[derive(Debug)]
pub enum BuiltIn {
    /// The echo.
    Echo(EchoHandler),
    /// An agent behind HTTP.
    Http(HttpHandler),
}

impl BuiltIn {
    /// The chosen handler, and the routes that the admin server, bound at `admin`, has to serve for it.
    ///
    /// # Errors
    ///
    /// When the agent could not be called, or could not call back.
    pub fn new(settings: &HandlerSettings, admin: SocketAddr) -> Result<(Self, Router), SetupError> {
        match settings {
            HandlerSettings::Echo(settings) => {
                Ok((Self::Echo(EchoHandler::new(settings.clone())), Router::new()))
            }
            HandlerSettings::Http(settings) => {
                let api = OperationsApi::new(settings, admin)?;
                let routes = api.routes();
                Ok((Self::Http(HttpHandler::new(settings, api)?), routes))
            }
        }
    }
}

impl TurnHandler for BuiltIn {
    async fn handle(&self, turn: Turn) -> Result<Reply, HandlerError> {
        match self {
            Self::Echo(echo) => echo.handle(turn).await,
            Self::Http(http) => http.handle(turn).await,
        }
    }
}

#[cfg(test)]
pub(crate) mod fixture;
