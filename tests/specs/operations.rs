//! Tool calls across attempts: their effect and how far they got decide whether a turn runs again, and their keys let a tool
//! know a repeated call.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use axum::{http::StatusCode, response::IntoResponse};
use serde_json::{Value, json};
use tests::World;
use uuid::Uuid;

use crate::outside::{Asked, Outside, reply};

const EFFECTS: [&str; 3] = ["read", "idempotent", "side_effect"];
const STATUSES: [&str; 3] = ["started", "completed", "failed"];

fn try_again() -> axum::response::Response {
    StatusCode::SERVICE_UNAVAILABLE.into_response()
}

/// What the user must see: `None`, a reply of the second attempt.
fn expected(effect: &str, status: &str) -> Option<&'static str> {
    match (effect, status) {
        ("side_effect", "started") => Some("side_effect_unknown"),
        ("side_effect", "completed") => Some("interrupted"),
        _ => None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn effect_and_status_of_an_operation_decide_whether_its_turn_runs_again() -> Result<()> {
    let world = World::new().await?;
    world.policy("debounce = '0', retry_backoff = '10 ms', max_attempts = 3").await?;
    // The first attempt of a conversation `<effect>-<status>` leaves its operation so, and fails.
    let outside = Outside::open(&world, async |asked: Asked| {
        let of = asked.told("conversation_id")?.to_owned();
        let (effect, status) = of.split_once('-').context("no case")?;
        if asked.is_first_attempt() {
            let operation = asked.begin_to_act("tool", effect, json!(1)).await?.context("refused")?;
            if status != "started" {
                asked.end(&operation["id"], json!({ "status": status, "output": null })).await?;
            }
            return Ok(try_again());
        }
        Ok(reply("at last"))
    })
    .await?;
    let _consumer = outside.asked_by(world.consumer()).env("SOURCE", "postgres").start()?;
    let cases = EFFECTS.into_iter().flat_map(|effect| STATUSES.map(|status| (effect, status)));
    for (effect, status) in cases.clone() {
        world.create_conversation(&format!("{effect}-{status}")).await?;
        world.submit(&format!("{effect}-{status}"), "hello").await?;
    }
    world.settled().await?;
    outside.kept(&world).await?;
    for (effect, status) in cases {
        let case = format!("{effect}-{status}");
        let said = world.outcomes(&case).await?.pop().context("no outcome")?;
        let Some(kind) = expected(effect, status) else {
            ensure!(said.content == "at last" && outside.calls(&case).len() == 2, "{case}: {said:?}");
            continue;
        };
        let error = said.error.context("no error")?;
        ensure!(
            error["kind"] == kind && error["attempts"] == 1 && error["retryable"] == false,
            "{case}: {error}"
        );
        let named = &error["operations"][0];
        let complete = named["name"] == "tool" && named["effect"] == effect && named["status"] == status;
        ensure!(complete && named["id"].is_string() && named["started_at"].is_string(), "{case}: {error}");
        ensure!(said.content.contains("tool"), "the user is told what it was: {}", said.content);
        ensure!(outside.calls(&case).len() == 1, "{case}: the model was called again");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_side_effect_in_doubt_at_the_last_attempt_is_both_exhausted_and_unknown() -> Result<()> {
    let world = World::new().await?;
    world.policy("debounce = '0', lease = '1 min', max_attempts = 1").await?;
    world.create_conversation("c1").await?;
    let outside = Outside::open(&world, async |asked: Asked| {
        asked.act("mail", "side_effect", json!(1)).await?;
        Ok(reply("sent"))
    })
    .await?;
    let named =
        || outside.asked_by(world.consumer()).env("SOURCE", "postgres").env("CONSUMER_NAME", "steady");
    let victim = named().failpoints("after_tool=kill").start()?;
    world.submit("c1", "hello").await?;
    victim.ended().await?;
    let _successor = named().start()?;
    let error = world.answered("c1", 1).await?.remove(0).error.context("no error")?;
    let fair = error["kind"] == "side_effect_unknown" && error["exhausted"] == true && error["attempts"] == 1;
    ensure!(fair && error["operations"][0]["name"] == "mail", "{error}");
    world.settled().await?;
    outside.kept(&world).await
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_equal_across_attempts_and_new_after_a_users_retry_which_confirms_what_it_may_double()
-> Result<()> {
    type Keys = Arc<Mutex<Vec<(String, i64, Value)>>>;
    let world = World::new().await?;
    world.policy("debounce = '0', retry_backoff = '10 ms', max_attempts = 2").await?;
    let keys: Keys = Arc::default();
    let noted = keys.clone();
    let outside = Outside::open(&world, move |asked: Asked| {
        let noted = noted.clone();
        async move {
            let effect = asked.told("conversation_id")?.to_owned();
            let operation = asked.act("charge", &effect, json!({ "eur": 7 })).await?.context("refused")?;
            let attempt = asked.turn["attempt"].as_i64().context("no attempt")?;
            let mut keys = noted.lock().unwrap_or_else(PoisonError::into_inner);
            keys.push((effect.clone(), attempt, operation["idempotency_key"].clone()));
            // The first turn of each fails at its cap, a user's retry succeeds.
            let is_retry = keys.iter().filter(|(of, number, _)| *of == effect && *number == 1).count() > 1;
            Ok(if is_retry { reply("charged") } else { try_again() })
        }
    })
    .await?;
    let _consumer = outside.asked_by(world.consumer()).env("SOURCE", "postgres").start()?;
    for effect in ["idempotent", "side_effect"] {
        world.create_conversation(effect).await?;
        world.submit(effect, "charge me").await?;
        let failed = world.answered(effect, 1).await?.remove(0);
        let retry = async |confirm: bool| {
            let retry = sqlx::query_scalar::<_, String>("select retry_turn($1, $2)");
            retry.bind(failed.turn_id).bind(confirm).fetch_one(&world.pool).await
        };
        if effect == "side_effect" {
            let refused = retry(false).await;
            let code = refused
                .as_ref()
                .err()
                .and_then(sqlx::Error::as_database_error)
                .and_then(sqlx::error::DatabaseError::code);
            ensure!(
                code.as_deref() == Some("OB011"),
                "it may double an effect, and nobody has confirmed: {refused:?}"
            );
        }
        ensure!(retry(effect == "side_effect").await? == "retried");
        let outcomes = world.answered(effect, 2).await?;
        ensure!(outcomes[1].content == "charged" && outcomes[1].turn_id != failed.turn_id, "{outcomes:?}");
    }
    world.settled().await?;
    let keys = keys.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let of = |effect: &str| -> Vec<(i64, Value)> {
        keys.iter().filter(|key| key.0 == effect).map(|key| (key.1, key.2.clone())).collect()
    };
    let [(1, first), (2, second), (1, retried)] = &of("idempotent")[..] else { anyhow::bail!("{keys:?}") };
    ensure!(first == second && first != retried, "{keys:?}");
    let [(1, first), (1, retried)] = &of("side_effect")[..] else { anyhow::bail!("{keys:?}") };
    ensure!(first != retried, "{keys:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_shows_the_operations_of_its_own_run_and_no_others() -> Result<()> {
    let world = World::new().await?;
    world.policy("debounce = '0', retry_backoff = '10 ms'").await?;
    world.create_conversation("c1").await?;
    let outside = Outside::open(&world, async |asked: Asked| {
        asked.act("search", "read", json!(asked.turn["attempt"])).await?;
        Ok(if asked.is_first_attempt() { try_again() } else { reply("found") })
    })
    .await?;
    let _consumer = outside.asked_by(world.consumer()).env("SOURCE", "postgres").start()?;
    world.submit("c1", "hello").await?;
    let outcomes = world.answered("c1", 1).await?;
    world.settled().await?;
    let shown: Vec<(Value, Option<String>, Uuid)> =
        sqlx::query_as("select input, message_id, run_id from operations order by started_at")
            .fetch_all(&world.pool)
            .await?;
    let [(first, None, _), (second, Some(message), run)] = &shown[..] else { anyhow::bail!("{shown:?}") };
    ensure!(*first == json!(1) && *second == json!(2), "{shown:?}");
    ensure!(*message == outcomes[0].id && Some(*run) == outcomes[0].run_id, "{shown:?}");
    outside.kept(&world).await
}
