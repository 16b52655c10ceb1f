//! The budget: Postgres is what the pipeline spends, so a loaded one shares its statements among many turns.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result, ensure};
use consumer::{Reply, Turn, handler_fn};
use shared::settings::Source;
use tests::World;

use super::measured;

const CONVERSATIONS: i32 = 20_000;
const MESSAGES: i32 = 20_000;

/// A transaction of the pipeline: words of its first statement, and of the others. Constants are not in the texts.
type Transaction = (&'static str, &'static [&'static str]);

const CLAIM_BEGIN_LOAD: &[Transaction] = &[
    ("a.max_turn_messages", &["as lane (conversation_id, turn_id, cap)", "with taken as"]),
    ("array_agg(id) as ids", &[]),
];
const FINISH: &[Transaction] = &[
    (
        "any($1) order by id for no key update skip locked",
        &["not l.cancel_requested\n            for update skip locked", "answered as ("],
    ),
    // One that waits for its locks, alone.
    ("for no key update", &["for update"]),
];

/// Calls of each statement of this database.
async fn calls(world: &World) -> Result<BTreeMap<String, i64>> {
    let calls: Vec<(String, i64)> = sqlx::query_as(
        "select query, sum(calls)::bigint from pg_stat_statements
         where dbid = (select oid from pg_database where datname = current_database()) group by query",
    )
    .fetch_all(&world.pool)
    .await?;
    Ok(calls.into_iter().collect())
}

/// Calls of these transactions, their BEGIN and their end included; takes them out of `calls`.
fn take(calls: &mut BTreeMap<String, i64>, transactions: &[Transaction]) -> Result<i64> {
    let mut sum = 0;
    for (position, (first, others)) in transactions.iter().enumerate() {
        for (words, weight) in [(first, 3)].into_iter().chain(others.iter().map(|words| (words, 1))) {
            let texts: Vec<String> = calls.keys().filter(|text| text.contains(*words)).cloned().collect();
            ensure!(!texts.is_empty() || position > 0, "no statement has {words}");
            let found: i64 = texts.iter().filter_map(|text| calls.remove(text)).sum();
            measured(&format!("{found} times {words:?}"))?;
            sum += found * weight;
        }
    }
    Ok(sum)
}

#[expect(clippy::cast_precision_loss, reason = "thousands")]
fn per_turn(calls: i64, turns: i64) -> f64 {
    calls as f64 / turns as f64
}

#[tokio::test(flavor = "multi_thread")]
async fn a_loaded_pipeline_shares_its_statements_among_many_turns() -> Result<()> {
    let world = World::new().await?;
    world.policy("debounce = '0', max_turn_messages = 1").await?;
    sqlx::raw_sql("create extension pg_stat_statements").execute(&world.pool).await?;
    sqlx::query("select count(create_conversation('c' || n)) from generate_series(1, $1) n")
        .bind(CONVERSATIONS)
        .execute(&world.pool)
        .await?;
    sqlx::query(
        "select count(submit_message('m' || n, 'c' || 1 + n % $1, 'hello')) from generate_series(1, $2) n",
    )
    .bind(CONVERSATIONS)
    .bind(MESSAGES)
    .execute(&world.pool)
    .await?;
    let _relay = world.local_relay().await?;
    let echo = handler_fn(|turn: Turn| async move {
        Ok(Reply::new(turn.messages.iter().map(|m| m.content.as_str()).collect::<String>()))
    });
    let _consumer = world.local_consumer(world.consumer_settings(Source::Nats), echo).await?;
    let everything = "select count(*) from messages where role = 'assistant'";
    world
        .eventually_within(Duration::from_mins(2), "everything is answered", async || {
            tokio::time::sleep(Duration::from_millis(100)).await;
            Ok(world.count(everything).await? == i64::from(MESSAGES))
        })
        .await?;

    let turns = i64::from(MESSAGES);
    let mut calls = calls(&world).await?;
    let before = take(&mut calls, CLAIM_BEGIN_LOAD).context("claim, begin and load")?;
    let after = take(&mut calls, FINISH).context("finish")?;
    let (before, after) = (per_turn(before, turns), per_turn(after, turns));
    measured(&format!("{before:.3} statements a turn for claim, begin and load, {after:.3} for the finish"))?;
    for (text, calls) in calls.iter().filter(|(_, calls)| **calls > turns / 100) {
        let words: Vec<_> = text.split_whitespace().take(12).collect();
        measured(&format!("{:.3} a turn: {}", per_turn(*calls, turns), words.join(" ")))?;
    }
    ensure!(before <= 0.2, "{before:.3} statements a turn for claim, begin and load");
    ensure!(after <= 1.0, "{after:.3} statements a turn for the finish");
    world.settled().await
}
