//! Several producers, and producers against the pipeline: nothing is doubled, lost or skipped.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use consumer::{Reply, Turn, TurnHandler, handler_fn};
use shared::settings::Source;
use sqlx::Connection;
use tests::World;
use tokio::sync::{Barrier, Semaphore, mpsc};

use super::{blocked, session, submit};

const ROUNDS: usize = 20;

fn echo() -> impl TurnHandler {
    handler_fn(|turn: Turn| async move { Ok(Reply::new(in_turn(&turn))) })
}

fn in_turn(turn: &Turn) -> String {
    let said: Vec<_> = turn.messages.iter().filter(|m| m.in_turn).map(|m| m.content.as_str()).collect();
    said.join("+")
}

/// Both orders of two submits of one id, the second of which waits for the first one's transaction.
#[tokio::test(flavor = "multi_thread")]
async fn a_submit_waits_for_an_open_one_of_the_same_id_and_follows_its_fate() -> Result<()> {
    let world = World::new().await?;
    for (round, (conversation, commits, expected)) in [
        ("c1", true, "duplicate"),
        ("c1", false, "created"),
        ("c2", true, "message_id_conflict (message_id)"),
        ("c2", false, "created"),
    ]
    .into_iter()
    .enumerate()
    {
        let (id, first, second) =
            (format!("m{round}"), format!("c1-{round}"), format!("{conversation}-{round}"));
        for conversation in [&first, &second] {
            world.create_conversation(conversation).await?;
        }
        let mut app = session(&world).await?;
        let mut open = app.begin().await?;
        ensure!(submit(&mut open, &id, &first, "hello").await == "created");
        let mut other = session(&world).await?;
        let waiting = tokio::spawn({
            let id = id.clone();
            async move { submit(&mut other, &id, &second, "hello").await }
        });
        blocked(&world, "submit_message", 1).await?;
        if commits {
            open.commit().await?;
        } else {
            open.rollback().await?;
        }
        let answer = waiting.await?;
        ensure!(answer == expected, "{answer}, and not {expected}");
    }
    ensure!(world.count("select count(*) from messages").await? == 4);
    ensure!(world.count("select count(*) from agent_outbox").await? == 4);
    let unlaned = "select count(*) from agent_outbox o join agent_lanes l using (conversation_id)
                   where l.state <> 'waiting'";
    ensure!(world.count(unlaned).await? == 0);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn of_submits_of_one_id_at_the_same_moment_exactly_one_creates() -> Result<()> {
    const PRODUCERS: usize = 4;
    let world = World::new().await?;
    for conversation in ["c0", "c1"] {
        world.create_conversation(conversation).await?;
    }
    let barrier = Arc::new(Barrier::new(PRODUCERS));
    for conversations in [1, 2] {
        let mut producers = Vec::new();
        for producer in 0..PRODUCERS {
            let (mut app, barrier) = (session(&world).await?, barrier.clone());
            producers.push(tokio::spawn(async move {
                let conversation = format!("c{}", producer % conversations);
                let mut answers = Vec::new();
                for round in 0..ROUNDS {
                    barrier.wait().await;
                    let id = format!("m{conversations}-{round}");
                    answers.push(submit(&mut app, &id, &conversation, "hello").await);
                }
                answers
            }));
        }
        let mut all = Vec::new();
        for producer in producers {
            all.push(producer.await?);
        }
        for round in 0..ROUNDS {
            let mut answers: Vec<_> = all.iter().map(|answers| answers[round].as_str()).collect();
            answers.sort_unstable();
            let conflict = "message_id_conflict (message_id)";
            let expected = match conversations {
                1 => ["created", "duplicate", "duplicate", "duplicate"],
                _ => ["created", "duplicate", conflict, conflict],
            };
            ensure!(answers == expected, "{answers:?}");
        }
    }
    let _consumer = world.local_consumer(world.consumer_settings(Source::Postgres), echo()).await?;
    world.settled().await?;
    ensure!(world.count("select count(*) from agent_outbox").await? == 2 * i64::try_from(ROUNDS)?);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_older_transaction_that_commits_after_a_newer_one_is_not_skipped() -> Result<()> {
    for source in [Source::Nats, Source::Postgres] {
        let world = World::new().await?;
        world.policy("debounce = '0'").await?;
        let _relay = if source == Source::Nats { Some(world.local_relay().await?) } else { None };
        let _consumer = world.local_consumer(world.consumer_settings(source), echo()).await?;
        for conversation in ["c1", "c2"] {
            world.create_conversation(conversation).await?;
        }
        let mut app = session(&world).await?;
        let mut older = app.begin().await?;
        // Its id and its outbox row are older than everything that follows.
        ensure!(submit(&mut older, "older-1", "c1", "older").await == "created");
        world.submit("c2", "newer").await?;
        world.answered("c2", 1).await?;
        ensure!(submit(&mut older, "older-2", "c2", "older").await == "created");
        older.commit().await?;
        let first = world.answered("c1", 1).await?;
        let second = world.answered("c2", 2).await?;
        world.settled().await?;
        ensure!(first[0].content == "older" && second[1].content == "older", "{first:?} {second:?}");
        let skipped = "select count(*) from agent_outbox o1 join agent_outbox o2 on o1.id < o2.id
            join messages m1 on m1.id = o1.message_id join messages m2 on m2.id = o2.message_id
            where m1.conversation_id = m2.conversation_id and m1.seq > m2.seq";
        ensure!(world.count(skipped).await? == 0, "rows stand in the order of seq");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_submit_that_is_open_while_a_turn_finishes_is_answered() -> Result<()> {
    for commits in [true, false] {
        let world = World::new().await?;
        world.policy("debounce = '0'").await?;
        let (seen, mut turns) = mpsc::unbounded_channel();
        let go = Arc::new(Semaphore::new(0));
        let handler = handler_fn({
            let go = go.clone();
            move |turn: Turn| {
                let (seen, go) = (seen.clone(), go.clone());
                async move {
                    let _ = seen.send(in_turn(&turn));
                    let _ = go.acquire().await.map(tokio::sync::SemaphorePermit::forget);
                    Ok(Reply::new(in_turn(&turn)))
                }
            }
        });
        let _relay = world.local_relay().await?;
        let _consumer = world.local_consumer(world.consumer_settings(Source::Nats), handler).await?;
        world.create_conversation("c1").await?;
        world.submit("c1", "one").await?;
        turns.recv().await.context("the first turn")?;
        let mut app = session(&world).await?;
        let mut open = app.begin().await?;
        ensure!(submit(&mut open, "m2", "c1", "two").await == "created");
        go.add_permits(2);
        // The finish waits for the submit's transaction, and must then see what it wrote.
        blocked(&world, "from conversations", 1).await?;
        if commits {
            open.commit().await?;
        } else {
            open.rollback().await?;
        }
        let outcomes = world.answered("c1", if commits { 2 } else { 1 }).await?;
        world.settled().await?;
        let said: Vec<_> = outcomes.iter().map(|outcome| (outcome.seq, outcome.content.as_str())).collect();
        let expected: &[_] = if commits { &[(3, "one"), (4, "two")] } else { &[(2, "one")] };
        ensure!(said == expected, "{said:?}");
    }
    Ok(())
}
