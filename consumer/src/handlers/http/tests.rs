use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex},
};

use axum::{
    Router,
    body::{Body, Bytes},
    http::{HeaderMap, Response as HttpResponse},
    routing::post,
};
use serde_json::{Value, json};
use tokio::{net::TcpListener, time::timeout};

use super::*;
use crate::handlers::fixture;

mod connection;

const PATIENCE: Duration = Duration::from_secs(20);

fn handler_at(url: String) -> HttpHandler {
    let settings = HttpSettings { url, operations_url: None, connect_timeout: Duration::from_secs(2) };
    let api = OperationsApi::new(&settings, (Ipv4Addr::LOCALHOST, 9465).into()).unwrap();
    HttpHandler::new(&settings, api).unwrap()
}

async fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let addr = listener.local_addr().unwrap();
    (listener, addr)
}

/// An agent on a port of its own that answers everything with what `answer` makes.
async fn agent(answer: impl Fn() -> HttpResponse<Body> + Clone + Send + Sync + 'static) -> HttpHandler {
    let (listener, addr) = listen().await;
    let routes = Router::new().fallback(post(async move || answer()));
    tokio::spawn(async move { axum::serve(listener, routes).await });
    handler_at(format!("http://user:secret@{addr}/turns"))
}

async fn answered(status: u16, body: &'static str) -> Result<Reply, HandlerError> {
    answered_with(status, &[], body).await
}

async fn answered_with(
    status: u16,
    headers: &'static [(&'static str, &'static str)],
    body: impl Into<Bytes>,
) -> Result<Reply, HandlerError> {
    let body: Bytes = body.into();
    let handler = agent(move || {
        let response = HttpResponse::builder().status(status);
        let response =
            headers.iter().fold(response, |response, (name, value)| response.header(*name, *value));
        response.body(body.clone().into()).unwrap()
    })
    .await;
    timeout(PATIENCE, handler.handle(fixture::turn())).await.unwrap()
}

fn failed(answered: Result<Reply, HandlerError>) -> (bool, String) {
    let error = answered.unwrap_err();
    (error.retryable, error.message)
}

#[tokio::test]
async fn the_agent_is_told_the_turn_and_its_reply_comes_back() {
    let (listener, addr) = listen().await;
    let seen: Arc<Mutex<Option<(HeaderMap, Value)>>> = Arc::default();
    let see = seen.clone();
    let routes = Router::new().route(
        "/turns",
        post(async move |headers: HeaderMap, body: Bytes| {
            *see.lock().unwrap() = Some((headers, serde_json::from_slice(&body).unwrap()));
            r#"{"reply": {"content": "hello", "more": 1}, "operations": null}"#
        }),
    );
    tokio::spawn(async move { axum::serve(listener, routes).await });
    let turn = fixture::turn();
    let run_id = turn.run_id.to_string();
    let reply = handler_at(format!("http://user:secret@{addr}/turns")).handle(turn).await.unwrap();
    assert_eq!(reply.content, "hello");

    let (headers, body) = seen.lock().unwrap().take().unwrap();
    assert_eq!(headers["traceparent"], "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
    assert_eq!(headers["idempotency-key"], run_id.as_str());
    assert_eq!(headers["authorization"], "Basic dXNlcjpzZWNyZXQ=");
    assert_eq!(headers["content-type"], "application/json");
    assert_eq!(body["protocol"], 1);
    assert_eq!(body["run_id"], run_id.as_str());
    assert_eq!(body["turn_id"], "00000000-0000-0000-0000-000000000000");
    assert_eq!(
        (&body["attempt"], &body["conversation_id"], &body["agent"]),
        (&json!(2), &json!("c 1"), &json!("default"))
    );
    assert_eq!(body["messages"].as_array().unwrap().len(), 4);
    assert_eq!(
        body["messages"][2],
        json!({ "id": "m3", "seq": 3, "role": "user", "content": "Grüezi", "in_turn": true })
    );
    assert_eq!(body["operations_url"], format!("http://127.0.0.1:9465/v1/runs/{run_id}/operations"));
    assert!(body["operations_token"].as_str().unwrap().len() >= 32);
}

#[tokio::test]
async fn a_trace_context_that_is_no_header_is_left_out() {
    let handler = agent(|| HttpResponse::new(r#"{"reply": {"content": ""}}"#.into())).await;
    let turn = Turn { trace_context: Some("a\r\nx-evil: 1".into()), ..fixture::turn() };
    assert_eq!(handler.handle(turn).await.unwrap().content, "");
}

#[tokio::test]
async fn an_agent_that_says_whether_to_retry_is_obeyed() {
    let said = r#"{"error": {"message": "no tokens left", "retryable": false}}"#;
    assert_eq!(
        failed(answered(503, said).await),
        (false, "the agent answered 503 Service Unavailable: no tokens left".into())
    );
    let said = r#"{"error": {"message": "wait", "retryable": true}}"#;
    assert_eq!(failed(answered(400, said).await), (true, "the agent answered 400 Bad Request: wait".into()));
    let half = r#"{"error": {"message": "half"}}"#;
    assert_eq!(failed(answered(400, half).await), (false, "the agent answered 400 Bad Request: half".into()));
}

#[tokio::test]
async fn without_a_word_of_the_agent_the_status_decides() {
    for (status, retryable) in [
        (400, false),
        (401, false),
        (404, false),
        (408, true),
        (409, false),
        (413, false),
        (422, false),
        (425, true),
        (429, true),
        (500, true),
        (501, true),
        (502, true),
        (503, true),
        (504, true),
        (599, true),
    ] {
        for body in ["", "<html>secret</html>", r#"{"error": "secret"}"#] {
            let (found, message) = failed(answered(status, body).await);
            assert_eq!(found, retryable, "{status} {body}");
            assert!(message.contains(&status.to_string()) && !message.contains("secret"), "{message}");
        }
    }
}

#[tokio::test]
async fn retry_after_counts_where_another_attempt_is_made() {
    let wait = &[("retry-after", "30")];
    assert_eq!(answered_with(429, wait, "").await.unwrap_err().retry_after, Some(Duration::from_secs(30)));
    assert_eq!(answered_with(503, &[("retry-after", "soon")], "").await.unwrap_err().retry_after, None);
    assert_eq!(answered_with(400, wait, "").await.unwrap_err().retry_after, None);
}

#[tokio::test]
async fn a_redirect_is_final_and_not_followed() {
    for status in [301, 302, 303, 307, 308] {
        let (retryable, message) = failed(answered_with(status, &[("location", "/elsewhere")], "").await);
        assert!(!retryable && message.contains("redirects are not followed"), "{message}");
    }
}

#[tokio::test]
async fn success_without_a_reply_is_final() {
    for status in [201, 202, 204] {
        let (retryable, message) = failed(answered(status, "").await);
        assert!(!retryable && message.contains("only 200 has a reply"), "{message}");
    }
}

#[tokio::test]
async fn an_answer_of_another_shape_is_final_and_named_but_not_quoted() {
    for (body, named) in [
        ("secret", "not JSON from line 1, column 1 on"),
        ("", "not JSON from line 1, column 0 on"),
        (r#"["secret"]"#, "the body must be an object"),
        (r#"{"error": {"message": "secret"}}"#, "reply is missing"),
        (r#"{"reply": "secret"}"#, "reply must be an object"),
        (r#"{"reply": {"secret": 1}}"#, "reply.content is missing"),
        (r#"{"reply": {"content": null}}"#, "reply.content must be a string"),
        (r#"{"reply": {"content": "secret"}, "operations": {}}"#, "operations must be an array"),
        (
            r#"{"reply": {"content": ""}, "operations": [{"name": "a", "effect": "secret", "input": 1}]}"#,
            "operations[0].effect must be read, idempotent or side_effect",
        ),
        (
            r#"{"reply": {"content": ""}, "operations": [{"name": "secret", "effect": "read"}]}"#,
            "operations[0].input is missing",
        ),
    ] {
        let (retryable, message) =
            failed(answered_with(200, &[("content-type", "text/html; x=secret")], body).await);
        assert!(!retryable && message.contains(named) && message.contains("text/html"), "{message}");
        assert!(!message.contains("secret"), "{message}");
    }
}

#[tokio::test]
async fn the_content_type_of_a_good_answer_does_not_matter() {
    let reply =
        answered_with(200, &[("content-type", "text/plain")], r#"{"reply": {"content": "hi"}}"#).await;
    assert_eq!(reply.unwrap().content, "hi");
}

#[tokio::test]
async fn an_answer_that_is_too_long_is_final_whether_it_says_so_or_streams_for_ever() {
    let (retryable, message) = failed(answered_with(200, &[], vec![b' '; body::MAX_ANSWER_BYTES + 1]).await);
    assert!(!retryable && message.contains("8 MiB"), "{message}");

    let endless =
        futures_util::stream::repeat_with(|| Ok::<_, std::io::Error>(Bytes::from(vec![b' '; 65536])));
    let handler = agent(move || HttpResponse::new(Body::from_stream(endless.clone()))).await;
    let (retryable, message) = failed(timeout(PATIENCE, handler.handle(fixture::turn())).await.unwrap());
    assert!(!retryable && message.contains("8 MiB"), "{message}");
}

#[tokio::test]
async fn an_endless_error_is_its_status() {
    let endless =
        futures_util::stream::repeat_with(|| Ok::<_, std::io::Error>(Bytes::from(vec![b' '; 65536])));
    let handler =
        agent(move || HttpResponse::builder().status(500).body(Body::from_stream(endless.clone())).unwrap())
            .await;
    let ended = timeout(PATIENCE, handler.handle(fixture::turn())).await.unwrap();
    assert_eq!(failed(ended), (true, "the agent answered 500 Internal Server Error".into()));
}

#[tokio::test]
async fn a_reported_side_effect_that_cannot_be_recorded_is_never_repeated() {
    let answer = |effect| {
        format!(
            r#"{{"reply": {{"content": "sent"}}, "operations": [{{"name": "mail", "effect": "{effect}", "input": {{}}}}]}}"#
        )
    };
    let (retryable, message) = failed(answered_with(200, &[], answer("side_effect")).await);
    assert!(
        !retryable && message.starts_with("operations[0] of the agent's answer was not recorded: "),
        "{message}"
    );
    assert!(failed(answered_with(200, &[], answer("read")).await).0);
    let nameless = answer("read").replace("mail", "");
    let (retryable, message) = failed(answered_with(200, &[], nameless).await);
    assert!(!retryable && message.contains("name must have 1 to 200 bytes"), "{message}");
}
