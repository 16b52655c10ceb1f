//! Why an operation was not recorded, as HTTP says it.

use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::json;
use shared::{ids::RunId, sqlstate};

use super::fields::Misfit;
use crate::operations::OperationError;

/// An answer that is not the one asked for.
#[derive(Debug)]
pub(super) struct Refusal {
    status: StatusCode,
    field: Option<String>,
    message: String,
}

impl Refusal {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, field: None, message: message.into() }
    }

    pub(super) fn unauthorized() -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "the token is missing, or no run of this consumer has it")
    }

    pub(super) fn run_ended() -> Self {
        Self::new(StatusCode::CONFLICT, "the run is over: stop, and call no tool")
    }

    /// Nobody knows whether it was recorded.
    pub(super) fn unknown() -> Self {
        Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "it is not known whether this was recorded: repeat it, and call no tool before a 201",
        )
    }

    /// What became of an operation of this run.
    pub(super) fn of(error: &OperationError, run_id: RunId) -> Self {
        match error {
            OperationError::LaneLost => {
                Self::new(StatusCode::CONFLICT, "the run has lost its lane: stop, and call no tool")
            }
            // The rule starts with the field's name.
            OperationError::Rejected(rule) => Self {
                status: StatusCode::UNPROCESSABLE_ENTITY,
                field: rule.split(' ').next().map(str::to_owned),
                message: (*rule).into(),
            },
            OperationError::NotStarted => Self::new(StatusCode::NOT_FOUND, "this run has no such operation"),
            OperationError::Database(refused) if sqlstate::is_rejected_content(refused) => {
                Self::new(StatusCode::UNPROCESSABLE_ENTITY, "Postgres cannot store this operation")
            }
            OperationError::Database(_) | OperationError::Failpoint(_) => {
                tracing::warn!(%run_id, %error, "a remote operation is in doubt");
                Self::unknown()
            }
        }
    }
}

impl From<Misfit> for Refusal {
    fn from(misfit: Misfit) -> Self {
        Self {
            status: StatusCode::UNPROCESSABLE_ENTITY,
            field: misfit.field().map(str::to_owned),
            message: misfit.to_string(),
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let retryable = matches!(self.status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::REQUEST_TIMEOUT);
        let mut error = json!({ "message": self.message, "retryable": retryable });
        if let Some(field) = self.field {
            error["field"] = field.into();
        }
        let mut response = (self.status, Json(json!({ "error": error }))).into_response();
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
