//! Bodies of answers, read up to a bound, since an agent may send without end.

use reqwest::{Response, header};

/// The longest answer: a reply of 1 MiB, at up to three times its size where everything is escaped, and operations of
/// 256 KiB twice each.
pub(super) const MAX_ANSWER_BYTES: usize = 8 * 1024 * 1024;

/// There is no whole body.
#[derive(Debug)]
pub(super) enum BodyError {
    TooLong,
    Broken(reqwest::Error),
}

/// The whole body, when it has at most `max` bytes. How long it may take is up to the caller.
pub(super) async fn read(mut response: Response, max: usize) -> Result<Vec<u8>, BodyError> {
    let announced = response.content_length().unwrap_or(0);
    if usize::try_from(announced).map_or(true, |announced| announced > max) {
        return Err(BodyError::TooLong);
    }
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(BodyError::Broken)? {
        if chunk.len() > max - body.len() {
            return Err(BodyError::TooLong);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// What the body says it is, for error texts: an agent behind a login page answers `text/html`.
pub(super) fn media_type(response: &Response) -> String {
    let given = response.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let essence = given.and_then(|given| given.split(';').next()).map_or("", str::trim);
    let is_short_token = essence.len() <= 80
        && essence.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"/+-._".contains(&byte));
    match essence {
        "" => "of no content type".into(),
        essence if is_short_token => essence.into(),
        _ => "of a strange content type".into(),
    }
}
