//! The same from a terminal or a script: outputs, exit codes, and messages that say how to go on.

use anyhow::{Result, ensure};
use consumer::{HandlerError, Reply, Turn, handler_fn};
use serde_json::{Value, json};
use shared::{settings::Source, state::Effect};
use tests::{World, world::Output};

use super::{claim_one, failed, settle, staff, talk, world};

async fn relay(world: &World, args: &[&str], code: i32) -> Result<Output> {
    let output = world.program("relay").args(args.iter().copied()).output("").await?;
    ensure!(output.code == Some(code), "{args:?}: {output:?}");
    Ok(output)
}

async fn relay_json(world: &World, args: &[&str]) -> Result<Value> {
    let output = relay(world, &[args, &["--json"]].concat(), 0).await?;
    Ok(serde_json::from_str(&output.stdout)?)
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_turns_are_listed_the_newest_first_as_long_as_they_are_failed() -> Result<()> {
    let world = world().await?;
    ensure!(relay(&world, &["failed", "list"], 0).await?.stdout == "no turn is failed\n");
    let mut turns = Vec::new();
    for conversation in ["c1", "c2", "c3"] {
        turns.push(failed(&world, conversation, &["secret"]).await?.1.to_string());
    }
    let listed = relay_json(&world, &["failed", "list"]).await?;
    let ids: Vec<_> = listed.as_array().into_iter().flatten().map(|turn| turn["turn_id"].clone()).collect();
    ensure!(ids == [json!(turns[2]), json!(turns[1]), json!(turns[0])], "{listed}");
    let first = &listed[0];
    ensure!(first["conversation_id"] == "c3" && first["agent"] == "default", "{first}");
    ensure!(first["kind"] == "handler" && first["attempts"] == 1, "{first}");
    ensure!(first["needs_confirmation"] == false, "{first}");
    ensure!(relay_json(&world, &["failed", "list", "--limit", "1"]).await?[0]["turn_id"] == json!(turns[2]));
    ensure!(relay_json(&world, &["failed", "list", "--kind", "crash"]).await? == json!([]));
    ensure!(relay_json(&world, &["failed", "list", "--agent", "other"]).await? == json!([]));
    let page = relay(&world, &["failed", "list", "--kind", "handler"], 0).await?.stdout;
    ensure!(turns.iter().all(|turn| page.contains(turn)) && !page.contains("secret"), "{page}");
    ensure!(page.lines().skip(1).all(|line| line.contains(" yes ")), "each may be retried: {page}");

    let retried = relay(&world, &["retry", &turns[1]], 0).await?;
    ensure!(retried.stdout == format!("retried {}: it will be answered as a turn of its own\n", turns[1]));
    ensure!(relay_json(&world, &["failed", "list"]).await?.as_array().map(Vec::len) == Some(2));
    let again = relay_json(&world, &["retry", &turns[1]]).await?;
    ensure!(again == json!({ "turn_id": turns[1], "outcome": "nothing_to_retry" }), "{again}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_turn_is_explained_without_what_anybody_said() -> Result<()> {
    let world = world().await?;
    let (_staff, mut calls) = staff(&world, Source::Postgres).await?;
    talk(&world, "c1", &["secret question"]).await?;
    calls.next().await?.fail(HandlerError::retryable("upstream said 503"));
    let call = calls.next().await?;
    let turn = call.turn.turn_id.to_string();
    let paid =
        call.turn.operations.start("pay", Effect::SideEffect, &json!({ "note": "secret input" })).await?;
    paid.complete(&json!({ "note": "secret output" })).await?;
    call.fail(HandlerError::fatal("upstream said 500"));
    world.answered("c1", 1).await?;

    let page = relay(&world, &["failed", "show", &turn], 0).await?.stdout;
    for shown in [
        "conversation  c1",
        "state         failed",
        "kind          interrupted",
        "attempts      2\n",
        "retryable     false: the same again would fail, or may repeat a side effect",
        "retry         relay retry",
        "--confirm-side-effects: one may have happened",
        "handler: upstream said 503",
        "handler: upstream said 500",
        "pay",
        "side_effect",
        "completed",
    ] {
        ensure!(page.contains(shown), "{shown}: {page}");
    }
    let shown = relay_json(&world, &["failed", "show", &turn]).await?;
    ensure!(!page.contains("secret") && !shown.to_string().contains("secret"), "{page}\n{shown}");
    ensure!(shown["state"] == "failed" && shown["needs_confirmation"] == true, "{shown}");
    let outcomes: Vec<_> =
        shown["attempts"].as_array().into_iter().flatten().map(|a| &a["outcome"]).collect();
    ensure!(outcomes == ["retry", "error"], "{shown}");
    ensure!(shown["attempts"][0]["took_seconds"].is_f64() && shown["attempts"][0]["worker"].is_string());
    ensure!(shown["operations"][0]["name"] == "pay" && shown["operations"][0]["status"] == "completed");

    let refused = relay(&world, &["retry", &turn], 1).await?;
    for shown in ["needs_confirmation", &format!("relay failed show {turn}"), "--confirm-side-effects"] {
        ensure!(refused.stderr.contains(shown) && refused.stdout.is_empty(), "{shown}: {refused:?}");
    }
    let confirmed = relay_json(&world, &["retry", &turn, "--confirm-side-effects"]).await?;
    ensure!(confirmed["outcome"] == "retried", "{confirmed}");
    calls.next().await?.reply("yes");
    world.settled().await?;
    ensure!(relay_json(&world, &["failed", "show", &turn]).await?["state"] == "over");
    let answered = world.outcomes("c1").await?[1].turn_id.to_string();
    ensure!(relay_json(&world, &["failed", "show", &answered]).await?["state"] == "answered");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_is_cancelled_from_a_terminal() -> Result<()> {
    let world = world().await?;
    world.policy("lease = '1 min'").await?;
    talk(&world, "c1", &["hello"]).await?;
    let queued = claim_one(&world, None).await?.turn_id.to_string();
    ensure!(relay_json(&world, &["failed", "show", &queued]).await?["state"] == "in_flight");
    let cancelled = relay_json(&world, &["cancel", &queued]).await?;
    ensure!(cancelled == json!({ "turn_id": queued, "outcome": "cancelled" }), "{cancelled}");
    ensure!(relay(&world, &["cancel", &queued], 0).await?.stdout.starts_with("nothing_to_cancel "));
    world.submit("c1", "another").await?;
    let running = claim_one(&world, Some("spec")).await?;
    let requested = relay_json(&world, &["cancel", &running.turn_id.to_string()]).await?;
    ensure!(requested["outcome"] == "cancel_requested", "{requested}");
    settle(&world.pool, &running, true).await?;
    world.settled().await
}

#[tokio::test(flavor = "multi_thread")]
async fn records_are_pruned_from_a_terminal() -> Result<()> {
    let world = world().await?;
    let (_, turn) = failed(&world, "c1", &["a", "b"]).await?;
    ensure!(relay_json(&world, &["prune", "--older-than", "1h"]).await? == json!({ "rows": 0, "runs": 0 }));
    let pruned = relay(&world, &["prune", "--older-than", "0s", "--batch", "1"], 0).await?;
    ensure!(pruned.stdout == "pruned 2 outbox rows and 1 runs\n", "{pruned:?}");
    ensure!(relay_json(&world, &["failed", "list"]).await? == json!([]));
    ensure!(relay_json(&world, &["retry", &turn.to_string()]).await?["outcome"] == "nothing_to_retry");
    let yes = handler_fn(|_: Turn| async { Ok(Reply::new("yes")) });
    let again = ["submit", "--conversation", "c1", "--message-id", "pruned", "--wait", "and now"];
    let answer = world.local_consumer(world.consumer_settings(Source::Postgres), yes).await?;
    let first = relay(&world, &again, 0).await?;
    answer.stop().await?;
    relay(&world, &["prune", "--older-than", "0s"], 0).await?;
    ensure!(world.count("select count(*) from agent_outbox").await? == 0);
    let repeated = relay(&world, &again, 0).await?;
    ensure!(repeated.stdout == "yes\n" && first.stdout == repeated.stdout, "{repeated:?}");
    let everything = relay_json(&world, &["prune", "--older-than", "500years"]).await?;
    ensure!(everything == json!({ "rows": 0, "runs": 0 }), "an age that no date has is no error");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mistake_says_how_to_go_on() -> Result<()> {
    let world = world().await?;
    let nobody = "00000000-0000-0000-0000-000000000001";
    let commands: [&[&str]; 3] = [&["failed", "show", nobody], &["retry", nobody], &["cancel", nobody]];
    for command in commands {
        let refused = relay(&world, command, 1).await?.stderr;
        ensure!(refused.contains("turn_not_found") && refused.contains("relay failed list"), "{refused}");
    }
    let usage: [(&[&str], &str); 8] = [
        (&["retry", "c1"], "TURN is a turn's id (a UUID), as `relay failed list`"),
        (&["cancel", "c1"], "TURN is a turn's id (a UUID)"),
        (&["failed", "show", "c1"], "TURN is a turn's id (a UUID)"),
        (&["requeue"], "--all"),
        (&["requeue", "--all", "--kind", "odd"], "side_effect_unknown"),
        (&["failed", "list", "--limit", "0"], "--limit"),
        (&["prune"], "--older-than"),
        (&["prune", "--older-than", "1h", "--batch", "0"], "--batch"),
    ];
    for (command, named) in usage {
        let refused = relay(&world, command, 64).await?.stderr;
        ensure!(refused.contains(named), "{named}: {refused}");
    }
    Ok(())
}
