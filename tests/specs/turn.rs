//! The life of a turn, from a committed message to a committed reply.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use consumer::{HandlerError, Reply, Turn, TurnHandler, handler_fn};
use shared::{settings::Source, state::Role};
use tests::World;
use tokio::sync::{Barrier, Semaphore, mpsc};

/// Answers with the contents of the turn's own messages.
fn echo() -> impl TurnHandler {
    handler_fn(|turn: Turn| async move { Ok(Reply::new(in_turn(&turn).join("+"))) })
}

fn in_turn(turn: &Turn) -> Vec<String> {
    turn.messages.iter().filter(|m| m.in_turn).map(|m| m.content.clone()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_committed_message_gets_a_committed_reply() -> Result<()> {
    for source in [Source::Nats, Source::Postgres] {
        let world = World::new().await?;
        let _relay = if source == Source::Nats { Some(world.local_relay().await?) } else { None };
        let _consumer = world.local_consumer(world.consumer_settings(source), echo()).await?;
        world.create_conversation("c1").await?;
        world.submit("c1", "hello").await?;
        let outcomes = world.answered("c1", 1).await?;
        ensure!(outcomes[0].role == "assistant" && outcomes[0].content == "hello", "{outcomes:?}");
        world.settled().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_that_come_together_form_one_turn() -> Result<()> {
    let world = World::new().await?;
    world.policy("debounce = '300 ms'").await?;
    let _relay = world.local_relay().await?;
    let _consumer = world.local_consumer(world.consumer_settings(Source::Nats), echo()).await?;
    world.create_conversation("c1").await?;
    for content in ["a", "b", "c"] {
        world.submit("c1", content).await?;
    }
    let outcomes = world.answered("c1", 1).await?;
    world.settled().await?;
    ensure!(outcomes[0].content == "a+b+c", "{outcomes:?}");
    ensure!(world.outcomes("c1").await?.len() == 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_steady_typist_is_answered_within_max_wait() -> Result<()> {
    const DUE: &str = "select (extract(epoch from wake_at) * 1000000)::bigint from agent_lanes";
    let world = World::new().await?;
    world.policy("debounce = '1 min', max_wait = '1 min'").await?;
    world.create_conversation("c1").await?;
    world.submit("c1", "first").await?;
    let due = world.count(DUE).await?;
    world.policy("debounce = '10 s', max_wait = '10 s'").await?;
    world.submit("c1", "second").await?;
    let sooner = world.count(DUE).await?;
    ensure!(sooner < due, "max_wait counts from the first message");
    world.submit("c1", "third").await?;
    ensure!(world.count(DUE).await? == sooner, "a later message does not postpone beyond max_wait");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_that_come_while_a_turn_runs_form_the_next_turn() -> Result<()> {
    let world = World::new().await?;
    world.policy("debounce = '0'").await?;
    let (seen, mut turns) = mpsc::unbounded_channel();
    let go = Arc::new(Semaphore::new(0));
    let handler = handler_fn({
        let go = go.clone();
        move |turn: Turn| {
            let (seen, go) = (seen.clone(), go.clone());
            async move {
                let _ = seen.send(turn.clone());
                let _ = go.acquire().await.map(tokio::sync::SemaphorePermit::forget);
                Ok(Reply::new(format!("re {}", in_turn(&turn).join("+"))))
            }
        }
    });
    let _relay = world.local_relay().await?;
    let _consumer = world.local_consumer(world.consumer_settings(Source::Nats), handler).await?;
    world.create_conversation("c1").await?;
    world.submit("c1", "one").await?;
    let first = turns.recv().await.context("first")?;
    world.submit("c1", "two").await?;
    world.submit("c1", "three").await?;
    go.add_permits(2);
    let second = turns.recv().await.context("second")?;
    world.settled().await?;
    ensure!(in_turn(&first) == ["one"] && in_turn(&second) == ["two", "three"]);
    ensure!(first.turn_id != second.turn_id);
    let read: Vec<_> = second.messages.iter().map(|m| (m.role, m.content.as_str())).collect();
    let expected =
        [(Role::User, "one"), (Role::Assistant, "re one"), (Role::User, "two"), (Role::User, "three")];
    ensure!(read == expected, "history is read by turn: {read:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn different_conversations_run_at_the_same_time() -> Result<()> {
    const CONVERSATIONS: usize = 8;
    let world = World::new().await?;
    // Each handler waits for all the others: one at a time, nobody would get through.
    let barrier = Arc::new(Barrier::new(CONVERSATIONS));
    let handler = handler_fn(move |_turn: Turn| {
        let barrier = barrier.clone();
        async move {
            barrier.wait().await;
            Ok(Reply::new("together"))
        }
    });
    let _relay = world.local_relay().await?;
    let _consumer = world.local_consumer(world.consumer_settings(Source::Nats), handler).await?;
    for number in 0..CONVERSATIONS {
        let conversation = format!("c{number}");
        world.create_conversation(&conversation).await?;
        world.submit(&conversation, "go").await?;
    }
    world.settled().await?;
    ensure!(world.count("select count(*) from messages where role = 'assistant'").await? == 8);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_attempt_is_tried_again_with_the_same_turn_and_counted() -> Result<()> {
    let world = World::new().await?;
    world.policy("debounce = '0', retry_backoff = '10 ms'").await?;
    let (seen, mut turns) = mpsc::unbounded_channel();
    let handler = handler_fn(move |turn: Turn| {
        let seen = seen.clone();
        async move {
            let _ = seen.send((turn.turn_id, turn.run_id, turn.attempt));
            if turn.attempt < 3 { Err(HandlerError::retryable("not yet")) } else { Ok(Reply::new("at last")) }
        }
    });
    let _relay = world.local_relay().await?;
    let _consumer = world.local_consumer(world.consumer_settings(Source::Nats), handler).await?;
    world.create_conversation("c1").await?;
    world.submit("c1", "try").await?;
    let outcomes = world.answered("c1", 1).await?;
    world.settled().await?;
    ensure!(outcomes[0].content == "at last");
    let mut runs = Vec::new();
    while let Ok(run) = turns.try_recv() {
        runs.push(run);
    }
    ensure!(runs.iter().map(|(_, _, attempt)| *attempt).collect::<Vec<_>>() == [1, 2, 3]);
    ensure!(runs.iter().all(|(turn, ..)| *turn == runs[0].0), "one turn");
    ensure!(runs[0].1 != runs[1].1 && runs[1].1 != runs[2].1, "a run each");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_fails_every_time_ends_in_a_visible_error_at_the_cap() -> Result<()> {
    let world = World::new().await?;
    world.policy("debounce = '0', retry_backoff = '10 ms', max_attempts = 3").await?;
    let calls = Arc::new(AtomicUsize::new(0));
    let handler = handler_fn({
        let calls = calls.clone();
        move |turn: Turn| {
            let calls = calls.clone();
            async move {
                match calls.fetch_add(1, Ordering::SeqCst) {
                    0 => panic!("a handler that panics"),
                    1 => tokio::time::sleep(Duration::from_hours(1)).await,
                    _ => {}
                }
                drop(turn);
                Err(HandlerError::retryable("never"))
            }
        }
    });
    world.policy("turn_timeout = '2 s'").await?;
    let _relay = world.local_relay().await?;
    let _consumer = world.local_consumer(world.consumer_settings(Source::Nats), handler).await?;
    world.create_conversation("c1").await?;
    world.submit("c1", "try").await?;
    let outcomes = world.answered("c1", 1).await?;
    world.settled().await?;
    ensure!(outcomes[0].role == "error", "{outcomes:?}");
    ensure!(calls.load(Ordering::SeqCst) == 3);
    let error: serde_json::Value =
        sqlx::query_scalar("select error from messages where role = 'error'").fetch_one(&world.pool).await?;
    ensure!(error["kind"] == "handler" && error["attempts"] == 3 && error["exhausted"] == true, "{error}");
    ensure!(error["operations"] == serde_json::json!([]), "{error}");
    ensure!(world.count("select unread_count::bigint from conversations").await? == 1);
    let kinds: Vec<Option<String>> =
        sqlx::query_scalar("select error->>'kind' from agent_runs order by attempt")
            .fetch_all(&world.pool)
            .await?;
    ensure!(kinds.iter().flatten().collect::<Vec<_>>() == ["handler", "timeout", "handler"], "{kinds:?}");
    Ok(())
}
