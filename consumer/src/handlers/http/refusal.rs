//! Answers other than 200. What the agent says about itself is obeyed; where it says nothing, its status decides.

use std::time::Duration;

use reqwest::{Response, StatusCode, header, header::HeaderMap};

use super::body;
use crate::{handler::HandlerError, operations_api::fields};

/// The longest body of an error; a longer one is not read.
const MAX_ERROR_BYTES: usize = 64 * 1024;
/// Time for an error's body to arrive; the status is known already.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest wait that is taken from `Retry-After`: an agent must not put a conversation off for days.
const MAX_RETRY_AFTER: Duration = Duration::from_hours(1);

/// `{error: {message, retryable}}`, as far as it is there.
#[derive(Default)]
struct Said {
    message: Option<String>,
    retryable: Option<bool>,
}

/// The failure that this answer means.
pub(super) async fn read(response: Response) -> HandlerError {
    let status = response.status();
    if status.is_redirection() {
        return HandlerError::fatal(format!(
            "the agent answered {status}, and redirects are not followed: HANDLER_URL must be the final address"
        ));
    }
    if !status.is_client_error() && !status.is_server_error() {
        return HandlerError::fatal(format!("the agent answered {status}, where only 200 has a reply"));
    }
    let wait = retry_after(response.headers());
    let body = tokio::time::timeout(BODY_TIMEOUT, body::read(response, MAX_ERROR_BYTES)).await;
    let said = body.ok().and_then(Result::ok).and_then(|body| said(&body)).unwrap_or_default();
    let message = match said.message {
        Some(message) => format!("the agent answered {status}: {message}"),
        None => format!("the agent answered {status}"),
    };
    match (said.retryable.unwrap_or_else(|| may_pass(status)), wait) {
        (false, _) => HandlerError::fatal(message),
        (true, None) => HandlerError::retryable(message),
        (true, Some(wait)) => HandlerError::retryable(message).after(wait),
    }
}

fn said(body: &[u8]) -> Option<Said> {
    let mut error = fields::parse(body).ok()?.take("error").ok()?.into_object().ok()?;
    Some(Said {
        message: error.take("message").and_then(fields::Field::into_text).ok(),
        retryable: error.take("retryable").ok().and_then(|field| field.into_value().as_bool()),
    })
}

/// Whether the status speaks of a state that may pass.
fn may_pass(status: StatusCode) -> bool {
    matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_EARLY | StatusCode::TOO_MANY_REQUESTS)
        || status.is_server_error()
}

/// `Retry-After` in seconds, or as a date, which is taken against the answer's own `Date`: no clock of ours is in it.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = |name| headers.get(name)?.to_str().ok().map(str::trim);
    let given = text(header::RETRY_AFTER)?;
    let wait = if !given.is_empty() && given.bytes().all(|byte| byte.is_ascii_digit()) {
        // More digits than fit are a long wait.
        Duration::from_secs(given.parse().unwrap_or(u64::MAX))
    } else {
        let now = httpdate::parse_http_date(text(header::DATE)?).ok()?;
        httpdate::parse_http_date(given).ok()?.duration_since(now).unwrap_or(Duration::ZERO)
    };
    Some(wait.min(MAX_RETRY_AFTER))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(headers: &[(header::HeaderName, &'static str)]) -> Option<Duration> {
        let value = |text| header::HeaderValue::from_static(text);
        retry_after(&headers.iter().map(|(name, text)| (name.clone(), value(text))).collect())
    }

    #[test]
    fn retry_after_is_seconds_or_a_date_against_the_answers_own_clock_and_has_a_cap() {
        let at = |text| (header::RETRY_AFTER, text);
        let now = (header::DATE, "Sun, 06 Nov 1994 08:49:37 GMT");
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        assert_eq!(wait(&[at("7")]), seconds(7));
        assert_eq!(wait(&[at("86400")]), Some(MAX_RETRY_AFTER));
        assert_eq!(wait(&[at("99999999999999999999999999")]), Some(MAX_RETRY_AFTER));
        assert_eq!(wait(&[at("Sun, 06 Nov 1994 08:50:07 GMT"), now.clone()]), seconds(30));
        assert_eq!(wait(&[at("Sun, 06 Nov 1994 08:00:00 GMT"), now.clone()]), seconds(0));
        assert_eq!(wait(&[at("Sun, 06 Nov 1994 08:50:07 GMT")]), None);
        for nonsense in ["", "soon", "-1", "1.5"] {
            assert_eq!(wait(&[at(nonsense), now.clone()]), None, "{nonsense}");
        }
        assert_eq!(wait(&[now]), None);
    }
}
