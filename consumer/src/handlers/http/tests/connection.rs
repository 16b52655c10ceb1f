//! Connections to an agent: refused, broken, closed and used again.

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
};

use super::*;

#[tokio::test]
async fn a_connection_that_fails_or_breaks_is_retried_and_its_address_stays_out_of_the_error() {
    let refused = handler_at("http://user:secret@127.0.0.1:1/turns".into()).handle(fixture::turn()).await;
    let (retryable, message) = failed(refused);
    assert!(retryable && message.starts_with("the agent could not be reached: "), "{message}");
    assert!(!message.contains("secret"), "{message}");

    for answer in [
        "",
        "HTTP/1.1 200 OK\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"reply\"",
        "secret\r\n\r\n",
    ] {
        let (listener, addr) = listen().await;
        tokio::spawn(async move {
            let (mut connection, _) = listener.accept().await.unwrap();
            let _ = connection.read(&mut [0; 4096]).await.unwrap();
            connection.write_all(answer.as_bytes()).await.unwrap();
        });
        let handler = handler_at(format!("http://user:secret@{addr}/turns"));
        let ended = timeout(PATIENCE, handler.handle(fixture::turn())).await.unwrap();
        let (retryable, message) = failed(ended);
        assert!(retryable && message.starts_with("the connection to the agent broke: "), "{message}");
        assert!(!message.contains("secret"), "{message}");
    }
}

#[tokio::test]
async fn a_turn_that_is_cancelled_or_dropped_closes_the_connection_to_a_slow_agent() {
    for cancel in [true, false] {
        let (listener, addr) = listen().await;
        let turn = fixture::turn();
        let cancelled = turn.cancelled.clone();
        let handler = handler_at(format!("http://{addr}/turns"));
        let mut running = Box::pin(async move { handler.handle(turn).await });
        let mut connection = tokio::select! {
            accepted = listener.accept() => accepted.unwrap().0,
            _ = &mut running => unreachable!("the agent has not answered"),
        };
        let mut request = [0; 4096];
        tokio::select! {
            read = connection.read(&mut request) => assert!(read.unwrap() > 0),
            _ = &mut running => unreachable!("the agent has not answered"),
        }
        if cancel {
            cancelled.cancel();
            assert!(timeout(PATIENCE, running).await.unwrap().unwrap_err().retryable);
        } else {
            drop(running);
        }
        let mut rest = Vec::new();
        let closed = timeout(PATIENCE, connection.read_to_end(&mut rest)).await.unwrap();
        assert!(
            closed.is_ok() || closed.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset)
        );
    }
}

#[tokio::test]
async fn an_agent_that_sends_a_byte_now_and_then_ends_with_the_turns_deadline() {
    let drip = futures_util::stream::unfold((), async |()| {
        tokio::time::sleep(Duration::from_millis(20)).await;
        Some((Ok::<_, std::io::Error>(Bytes::from_static(b" ")), ()))
    });
    let drip = Arc::new(Mutex::new(Some(Box::pin(drip))));
    let handler =
        agent(move || HttpResponse::new(Body::from_stream(drip.lock().unwrap().take().unwrap()))).await;
    assert!(timeout(Duration::from_millis(300), handler.handle(fixture::turn())).await.is_err());
}

#[tokio::test]
async fn connections_are_reused() {
    let (listener, addr) = listen().await;
    let peers: Arc<Mutex<Vec<SocketAddr>>> = Arc::default();
    let see = peers.clone();
    let routes = Router::new().fallback(async move |peer: axum::extract::ConnectInfo<SocketAddr>| {
        see.lock().unwrap().push(peer.0);
        r#"{"reply": {"content": "hi"}}"#
    });
    tokio::spawn(async move {
        axum::serve(listener, routes.into_make_service_with_connect_info::<SocketAddr>()).await
    });
    let handler = handler_at(format!("http://{addr}/"));
    for _ in 0..3 {
        handler.handle(fixture::turn()).await.unwrap();
    }
    let peers = peers.lock().unwrap();
    assert!(peers.len() == 3 && peers.iter().all(|peer| *peer == peers[0]), "{peers:?}");
}

#[tokio::test]
async fn an_agent_that_cannot_be_reached_in_time_is_retried() {
    // Nobody accepts, and the queue of connections is full.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let listener = socket.listen(1).unwrap();
    let addr = listener.local_addr().unwrap();
    let mut waiting = Vec::new();
    while let Ok(Ok(connection)) = timeout(Duration::from_millis(200), TcpStream::connect(addr)).await {
        waiting.push(connection);
    }
    let handler = handler_at(format!("http://{addr}/"));
    let ended = timeout(PATIENCE, handler.handle(fixture::turn())).await.unwrap();
    let (retryable, message) = failed(ended);
    assert!(retryable && message.starts_with("the agent could not be reached: "), "{message}");
}
