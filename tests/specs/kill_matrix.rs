//! The kill matrix: every place at which a process can be stopped × everything that can happen there. Real processes, a real
//! outside world; afterwards every promise was kept, and what the user sees is exactly what it had to be.

mod cell;
mod expected;
mod place;

use anyhow::{Result, ensure};
use cell::Cell;
use futures_util::{StreamExt, stream};
use place::{Harm, Place};

/// The effects that a tool can have.
const EFFECTS: [&str; 3] = ["read", "idempotent", "side_effect"];
/// Cells of one test under way at once: they mostly wait for leases.
const AT_ONCE: usize = 6;

/// Plays cells side by side, and names those that failed.
async fn play(cells: Vec<Cell>) -> Result<()> {
    let played = stream::iter(cells).map(async |cell| {
        let ended = cell.play().await;
        ended.err().map(|error| format!("\n{cell:?}: {error:#}\n"))
    });
    let failed: Vec<Option<String>> = played.buffer_unordered(AT_ONCE).collect().await;
    let failed: String = failed.into_iter().flatten().collect();
    ensure!(failed.is_empty(), failed);
    Ok(())
}

/// All that can happen at a place. The tool's effect changes from cell to cell; where a process stands still with a tool
/// call on record, the effect decides, and two of them are tried.
async fn all_harm_at(place: Place) -> Result<()> {
    let turn = place as usize;
    let mut cells: Vec<Cell> = (Harm::ALL.into_iter().enumerate())
        .map(|(number, harm)| Cell { place, harm, effect: EFFECTS[(turn + number) % EFFECTS.len()] })
        .collect();
    if place.has_operation() {
        cells.retain(|cell| cell.harm != Harm::Stop);
        cells.extend(["idempotent", "side_effect"].map(|effect| Cell { place, harm: Harm::Stop, effect }));
    }
    play(cells).await
}

/// A kill at places, whatever the tool does.
async fn killed_at(places: &[Place]) -> Result<()> {
    let with = |effect| places.iter().map(move |place| Cell { place: *place, harm: Harm::Kill, effect });
    play(EFFECTS.into_iter().flat_map(with).collect()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_harm_before_a_claim_loses_or_doubles_anything() -> Result<()> {
    all_harm_at(Place::BeforeClaim).await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_harm_after_a_claim_loses_or_doubles_anything() -> Result<()> {
    all_harm_at(Place::AfterClaim).await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_harm_after_a_publish_loses_or_doubles_anything() -> Result<()> {
    all_harm_at(Place::AfterPublish).await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_harm_amid_a_look_after_what_is_queued_loses_or_doubles_anything() -> Result<()> {
    all_harm_at(Place::AmidLookAfter).await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_harm_amid_a_recovery_loses_or_doubles_anything() -> Result<()> {
    all_harm_at(Place::AmidRecovery).await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_harm_after_a_receipt_loses_or_doubles_anything() -> Result<()> {
    all_harm_at(Place::AfterReceive).await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_harm_after_a_begin_loses_or_doubles_anything() -> Result<()> {
    all_harm_at(Place::AfterBegin).await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_harm_during_a_model_call_loses_or_doubles_anything() -> Result<()> {
    all_harm_at(Place::ModelCall).await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_harm_before_an_operation_starts_loses_or_doubles_anything() -> Result<()> {
    all_harm_at(Place::BeforeOpStart).await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_harm_after_an_operation_has_started_loses_or_doubles_anything() -> Result<()> {
    all_harm_at(Place::AfterOpStart).await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_harm_after_a_tool_has_acted_loses_or_doubles_anything() -> Result<()> {
    all_harm_at(Place::AfterTool).await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_harm_after_an_operation_has_ended_loses_or_doubles_anything() -> Result<()> {
    all_harm_at(Place::AfterOpEnd).await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_harm_before_a_finish_loses_or_doubles_anything() -> Result<()> {
    all_harm_at(Place::BeforeFinish).await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_harm_amid_a_finish_loses_or_doubles_anything() -> Result<()> {
    all_harm_at(Place::AmidFinish).await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_harm_after_a_finish_loses_or_doubles_anything() -> Result<()> {
    all_harm_at(Place::AfterFinish).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_killed_before_the_claim_leaves_the_message_to_be_answered_once() -> Result<()> {
    killed_at(&[Place::BeforeClaim]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_killed_during_the_model_call_is_succeeded_and_the_message_answered_once() -> Result<()> {
    killed_at(&[Place::ModelCall]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_killed_after_a_tool_repeats_only_what_may_be_repeated() -> Result<()> {
    killed_at(&[Place::AfterTool, Place::AfterOpEnd]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_killed_before_the_final_commit_has_said_nothing_and_repeats_no_side_effect() -> Result<()>
{
    killed_at(&[Place::BeforeFinish, Place::AmidFinish]).await
}
