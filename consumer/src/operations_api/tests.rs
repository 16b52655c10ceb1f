use std::{
    net::{Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use reqwest::{Client, Method, StatusCode};
use serde_json::{Value, json};
use shared::ids::OperationId;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

use super::*;
use crate::{handlers::fixture, operations::MAX_JSON_BYTES};

fn settings(operations_url: Option<&str>) -> HttpSettings {
    HttpSettings {
        url: "http://127.0.0.1:1/".into(),
        operations_url: operations_url.map(str::to_owned),
        connect_timeout: Duration::from_secs(1),
    }
}

async fn served() -> (OperationsApi, SocketAddr) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let addr = listener.local_addr().unwrap();
    let api = OperationsApi::new(&settings(None), addr).unwrap();
    let routes = api.routes();
    tokio::spawn(async move { axum::serve(listener, routes).await });
    (api, addr)
}

fn register(api: &OperationsApi) -> Registered {
    let run_id = RunId::fresh();
    api.register(run_id, fixture::operations_without_database(run_id))
}

async fn ask(method: Method, url: &str, token: &str, body: impl Into<reqwest::Body>) -> (StatusCode, Value) {
    let _already_installed = rustls::crypto::ring::default_provider().install_default();
    let client = Client::builder().no_proxy().tls_certs_only([]).build().unwrap();
    let request = client.request(method, url).header("authorization", token).body(body);
    let response = request.send().await.unwrap();
    (response.status(), response.json().await.unwrap())
}

fn bearer(registered: &Registered) -> String {
    format!("Bearer {}", registered.token.reveal())
}

const CALL: &str = r#"{"name": "mail", "effect": "side_effect", "input": {}}"#;

#[test]
fn an_agent_is_told_an_address_that_it_can_reach_or_the_start_is_refused() {
    let base = |url, admin: SocketAddr| {
        OperationsApi::new(&settings(url), admin)
            .map(|api| api.0.base.clone())
            .map_err(|error| error.to_string())
    };
    assert_eq!(base(None, (Ipv4Addr::LOCALHOST, 9465).into()).unwrap(), "http://127.0.0.1:9465");
    assert_eq!(base(None, (Ipv6Addr::LOCALHOST, 9465).into()).unwrap(), "http://[::1]:9465");
    for any in [(Ipv4Addr::UNSPECIFIED, 9465).into(), (Ipv6Addr::UNSPECIFIED, 9465).into()] {
        assert!(base(None, any).unwrap_err().contains("OPERATIONS_URL"));
        assert_eq!(base(Some("https://me/base/"), any).unwrap(), "https://me/base");
    }
}

#[tokio::test]
async fn only_the_token_of_a_running_run_is_let_in() {
    let (api, addr) = served().await;
    let (registered, other) = (register(&api), register(&api));
    let unknown = format!("http://{addr}/v1/runs/{}/operations", RunId::fresh());
    let no_run = format!("http://{addr}/v1/runs/none/operations");
    let token = bearer(&registered);
    for (url, token) in [
        (&registered.url, String::new()),
        (&registered.url, bearer(&other)),
        (&registered.url, registered.token.reveal().to_owned()),
        (&registered.url, format!("Basic {}", registered.token.reveal())),
        (&registered.url, format!("{token}0")),
        (&unknown, token.clone()),
        (&no_run, token.clone()),
    ] {
        assert_eq!(ask(Method::POST, url, &token, CALL).await.0, StatusCode::UNAUTHORIZED, "{url}");
        let operation = format!("{url}/{}", OperationId::fresh());
        assert_eq!(ask(Method::PATCH, &operation, &token, "{}").await.0, StatusCode::UNAUTHORIZED, "{url}");
    }
    // Let in: what is wrong now is the body.
    assert_eq!(ask(Method::POST, &registered.url, &token, "").await.0, StatusCode::UNPROCESSABLE_ENTITY);
    let lower_case = token.replace("Bearer", "bearer");
    assert_eq!(ask(Method::POST, &registered.url, &lower_case, "").await.0, StatusCode::UNPROCESSABLE_ENTITY);
}

#[tokio::test]
async fn after_its_run_a_token_is_told_that_the_run_is_over_and_later_nothing() {
    let (api, _) = served().await;
    let registered = register(&api);
    let (url, token) = (registered.url.clone(), bearer(&registered));
    drop(registered);
    assert_eq!(ask(Method::POST, &url, &token, CALL).await.0, StatusCode::CONFLICT);
    assert_eq!(ask(Method::POST, &url, "Bearer wrong", CALL).await.0, StatusCode::UNAUTHORIZED);
    for _ in 0..REMEMBERED {
        drop(register(&api));
    }
    assert_eq!(ask(Method::POST, &url, &token, CALL).await.0, StatusCode::UNAUTHORIZED);
    assert_eq!(api.runs().ended.len(), REMEMBERED);
    assert!(api.runs().running.is_empty());
}

#[tokio::test]
async fn a_newer_registration_survives_the_end_of_an_older_one() {
    let (api, _) = served().await;
    let run_id = RunId::fresh();
    let operations = fixture::operations_without_database(run_id);
    let (older, newer) = (api.register(run_id, operations.clone()), api.register(run_id, operations));
    drop(older);
    assert!(matches!(api.access(run_id, newer.token.reveal()), Access::Granted(_)));
}

#[tokio::test]
async fn a_wrong_body_is_refused_and_its_field_is_named() {
    let (api, _) = served().await;
    let registered = register(&api);
    let token = bearer(&registered);
    let huge = format!(r#"{{"name": "a", "effect": "read", "input": "{}"}}"#, "x".repeat(MAX_JSON_BYTES));
    let long = format!(r#"{{"name": "{}", "effect": "read", "input": 1}}"#, "x".repeat(201));
    for (body, field) in [
        ("secret", Value::Null),
        ("[]", json!("the body")),
        (r#"{"effect": "read", "input": 1}"#, json!("name")),
        (r#"{"name": 1, "effect": "read", "input": 1}"#, json!("name")),
        (r#"{"name": "", "effect": "read", "input": 1}"#, json!("name")),
        (&long, json!("name")),
        (r#"{"name": "a", "input": 1}"#, json!("effect")),
        (r#"{"name": "a", "effect": "secret", "input": 1}"#, json!("effect")),
        (r#"{"name": "a", "effect": "read", "arguments": "secret"}"#, json!("input")),
        (&huge, json!("input")),
    ] {
        let (status, answer) = ask(Method::POST, &registered.url, &token, body.to_owned()).await;
        assert_eq!(
            (status, &answer["error"]["field"]),
            (StatusCode::UNPROCESSABLE_ENTITY, &field),
            "{answer}"
        );
        assert!(!answer.to_string().contains("secret"), "{answer}");
    }
    let operation = format!("{}/{}", registered.url, OperationId::fresh());
    for (body, field) in [
        (r"{}", json!("status")),
        (r#"{"status": "secret"}"#, json!("status")),
        (r#"{"status": "started"}"#, json!("status")),
    ] {
        let (status, answer) = ask(Method::PATCH, &operation, &token, body).await;
        assert_eq!(
            (status, &answer["error"]["field"]),
            (StatusCode::UNPROCESSABLE_ENTITY, &field),
            "{answer}"
        );
    }
}

#[tokio::test]
async fn an_input_is_measured_as_it_is_kept_not_as_it_was_escaped() {
    let (api, _) = served().await;
    let registered = register(&api);
    let escaped = r"\u044f".repeat(MAX_JSON_BYTES / 2 - 10);
    let body = format!(r#"{{"name": "a", "effect": "read", "input": "{escaped}"}}"#);
    // Good; only the database is not there.
    let (status, _) = ask(Method::POST, &registered.url, &bearer(&registered), body).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test]
async fn a_body_beyond_all_measure_is_refused_by_its_bound() {
    let (api, _) = served().await;
    let registered = register(&api);
    let body = vec![b' '; 4 * MAX_JSON_BYTES + 1];
    let (status, answer) = ask(Method::POST, &registered.url, &bearer(&registered), body).await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
    assert!(answer["error"]["message"].as_str().unwrap().contains("1024 KiB"), "{answer}");
}

#[tokio::test]
async fn without_postgres_nobody_knows_and_the_agent_is_told_to_repeat() {
    let (api, _) = served().await;
    let registered = register(&api);
    let (token, operation) = (bearer(&registered), format!("{}/{}", registered.url, OperationId::fresh()));
    let started = ask(Method::POST, &registered.url, &token, CALL).await;
    let ended = ask(Method::PATCH, &operation, &token, r#"{"status": "completed"}"#).await;
    for (status, answer) in [started, ended] {
        assert_eq!((status, &answer["error"]["retryable"]), (StatusCode::SERVICE_UNAVAILABLE, &json!(true)));
    }
}

#[tokio::test]
async fn an_operation_that_cannot_be_is_not_found() {
    let (api, _) = served().await;
    let registered = register(&api);
    let url = format!("{}/none", registered.url);
    let (status, _) = ask(Method::PATCH, &url, &bearer(&registered), r#"{"status": "failed"}"#).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn nothing_is_read_from_somebody_without_a_token() {
    let (api, addr) = served().await;
    let registered = register(&api);
    let path = registered.url.split_once(&addr.to_string()).unwrap().1;
    let mut connection = TcpStream::connect(addr).await.unwrap();
    let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n");
    connection.write_all(head.as_bytes()).await.unwrap();
    let mut answer = [0; 12];
    tokio::time::timeout(Duration::from_secs(5), connection.read_exact(&mut answer)).await.unwrap().unwrap();
    assert_eq!(&answer, b"HTTP/1.1 401");
}
