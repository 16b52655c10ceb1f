//! The two calls, from the request to the record: who asks comes first, so that nobody else's body is read.

use std::{future::Future, time::Duration};

use axum::{
    Json,
    body::Bytes,
    extract::{
        DefaultBodyLimit, FromRequest as _, Path, Request, State,
        rejection::{BytesRejection, FailedToBufferBody},
    },
    http::{HeaderMap, StatusCode, header},
    routing::{patch, post},
};
use serde_json::{Value, json};
use shared::{
    admin::Router,
    ids::{OperationId, RunId},
    state::{Effect, OperationStatus},
};
use tokio::time::timeout;

use super::{Access, OperationsApi, fields, refusal::Refusal};
use crate::operations::{MAX_JSON_BYTES, OperationError, Operations};

/// The longest body. JSON of 256 KiB may be sent with every character escaped, at three times its size.
const MAX_BODY_BYTES: usize = 4 * MAX_JSON_BYTES;
/// Time for a body to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for Postgres to answer: longer than it waits for a lock.
const RECORD_TIMEOUT: Duration = Duration::from_secs(15);

pub(super) fn routes(api: OperationsApi) -> Router {
    Router::new()
        .route("/v1/runs/{run_id}/operations", post(start))
        .route("/v1/runs/{run_id}/operations/{id}", patch(end))
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .with_state(api)
}

async fn start(
    State(api): State<OperationsApi>,
    Path(run_id): Path<String>,
    request: Request,
) -> Result<(StatusCode, Json<Value>), Refusal> {
    let (run_id, operations) = authorized(&api, &run_id, request.headers())?;
    let body = body(request).await?;
    let mut call = fields::parse(&body)?;
    let name = call.take("name")?.into_text()?;
    let effect: Effect = call.take("effect")?.into_word(fields::EFFECTS)?;
    let input = call.take("input")?.into_value();
    let operation = recorded(run_id, operations.start(&name, effect, &input)).await?;
    let answer = json!({ "id": operation.id, "idempotency_key": operation.idempotency_key });
    Ok((StatusCode::CREATED, Json(answer)))
}

async fn end(
    State(api): State<OperationsApi>,
    Path((run_id, id)): Path<(String, String)>,
    request: Request,
) -> Result<Json<Value>, Refusal> {
    let (run_id, operations) = authorized(&api, &run_id, request.headers())?;
    let id: OperationId = id.parse().map_err(|_| Refusal::of(&OperationError::NotStarted, run_id))?;
    let body = body(request).await?;
    let mut ended = fields::parse(&body)?;
    let status: OperationStatus = ended.take("status")?.into_word("completed or failed")?;
    let output = ended.optional("output").map_or(Value::Null, fields::Field::into_value);
    recorded(run_id, async {
        match operations.end(id, status, &output).await {
            Err(OperationError::NotStarted) if operations.status(id).await?.is_some() => Ok(None),
            ended => ended.map(Some),
        }
    })
    .await?
    .ok_or_else(|| Refusal::new(StatusCode::CONFLICT, "the operation has ended already"))?;
    Ok(Json(json!({ "id": id, "status": status })))
}

fn authorized(
    api: &OperationsApi,
    run_id: &str,
    headers: &HeaderMap,
) -> Result<(RunId, Operations), Refusal> {
    let run_id: RunId = run_id.parse().map_err(|_| Refusal::unauthorized())?;
    let token = bearer(headers).ok_or_else(Refusal::unauthorized)?;
    match api.access(run_id, token) {
        Access::Granted(operations) => Ok((run_id, operations)),
        Access::RunEnded => Err(Refusal::run_ended()),
        Access::Denied => Err(Refusal::unauthorized()),
    }
}

/// The scheme's name has no case.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

/// The whole body. Its content type is not asked for: it is JSON or it is refused.
async fn body(request: Request) -> Result<Bytes, Refusal> {
    let late = Refusal::new(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time");
    match timeout(BODY_TIMEOUT, Bytes::from_request(request, &())).await.map_err(|_| late)? {
        Ok(body) => Ok(body),
        Err(BytesRejection::FailedToBufferBody(FailedToBufferBody::LengthLimitError(_))) => {
            let message = format!("the body must have at most {} KiB", MAX_BODY_BYTES / 1024);
            Err(Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, message))
        }
        Err(_) => Err(Refusal::new(StatusCode::BAD_REQUEST, "the body broke off")),
    }
}

async fn recorded<T>(
    run_id: RunId,
    record: impl Future<Output = Result<T, OperationError>>,
) -> Result<T, Refusal> {
    let in_time = timeout(RECORD_TIMEOUT, record).await.map_err(|_late| {
        tracing::warn!(%run_id, "a remote operation is in doubt: no answer from Postgres");
        Refusal::unknown()
    })?;
    in_time.map_err(|error| Refusal::of(&error, run_id))
}
