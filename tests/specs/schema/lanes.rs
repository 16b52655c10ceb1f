//! The lane's shape in each state, and the triggers that keep one lane a conversation.

use anyhow::{Result, ensure};
use tests::World;

use super::{execute, offenders, refused_by};

const STATES: [&str; 4] = ["idle", "waiting", "queued", "running"];

/// A column, values that fit idle, waiting, queued and running, and one more that does not, where there is one.
type Column = (&'static str, [&'static str; 4], [Option<&'static str>; 4]);

const NOW: &str = "now()";
const NULL: &str = "null";
const ID: &str = "gen_random_uuid()";

const COLUMNS: [Column; 10] = [
    ("wake_at", [NULL, NOW, NOW, NOW], [Some(NOW), Some(NULL), Some(NULL), Some(NULL)]),
    ("waiting_since", [NULL, NOW, NOW, NOW], [Some(NOW), Some(NULL), Some(NULL), Some(NULL)]),
    ("turn_id", [NULL, NULL, ID, ID], [Some(ID), None, Some(NULL), Some(NULL)]),
    ("run_id", [NULL, NULL, ID, ID], [Some(ID), Some(ID), Some(NULL), Some(NULL)]),
    ("attempt", ["0", "0", "1", "1"], [Some("1"), Some("1"), Some("0"), Some("0")]),
    ("dispatches", ["0", "0", "1", "1"], [Some("1"), Some("1"), Some("0"), None]),
    ("worker", [NULL, NULL, NULL, "'w'"], [Some("'w'"), Some("'w'"), Some("'w'"), Some(NULL)]),
    ("claimed_at", [NULL, NULL, NOW, NOW], [Some(NOW), Some(NOW), Some(NULL), Some(NULL)]),
    ("started_at", [NULL, NULL, NULL, NOW], [Some(NOW), Some(NOW), Some(NOW), Some(NULL)]),
    ("cancel_requested", ["false"; 4], [Some("true"), Some("true"), Some("true"), None]),
];

/// An update to `state` with every column as it fits, but for those in `other`.
fn update(state: usize, other: &[(&str, &str)]) -> String {
    let columns = COLUMNS.map(|(column, fits, _)| {
        let value = other.iter().find(|(name, _)| *name == column).map_or(fits[state], |(_, value)| *value);
        format!("{column} = {value}")
    });
    format!("update agent_lanes set state = '{}', {}", STATES[state], columns.join(", "))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lane_has_exactly_the_columns_of_its_state() -> Result<()> {
    let world = World::new().await?;
    world.create_conversation("c1").await?;
    for state in 0..STATES.len() {
        execute(&world.pool, &update(state, &[])).await?;
        for (column, _, unfit) in COLUMNS {
            let Some(value) = unfit[state] else { continue };
            let statement = update(state, &[(column, value)]);
            let by = refused_by(&world.pool, &statement).await;
            ensure!(by == "agent_lanes_columns_fit_state", "{statement}: refused by {by}");
        }
    }
    // A turn that waits for its next attempt keeps its id and its count; one that is counted below zero is nobody's.
    execute(&world.pool, &update(1, &[("turn_id", ID), ("attempt", "1")])).await?;
    execute(&world.pool, &update(3, &[("cancel_requested", "true")])).await?;
    let by = refused_by(&world.pool, &update(1, &[("turn_id", ID), ("attempt", "-1")])).await;
    ensure!(by == "agent_lanes_columns_fit_state", "refused by {by}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_conversation_gets_a_lane_of_its_agent_made_one_by_one_or_in_bulk() -> Result<()> {
    const WRONG: &str = "
        select c.id from conversations c left join agent_lanes l on l.conversation_id = c.id
        where (l.agent, l.state) is distinct from (c.agent, 'idle')";
    let world = World::new().await?;
    let pool = &world.pool;
    execute(pool, "insert into agents (name) values ('other')").await?;
    execute(pool, "select create_conversation('c1'), create_conversation('c2', 'other')").await?;
    execute(pool, "insert into conversations (id) values ('single')").await?;
    execute(
        pool,
        "insert into conversations (id, agent)
         select 'bulk-' || n, case when n % 2 = 0 then 'default' else 'other' end from generate_series(1, 1000) n",
    )
    .await?;
    execute(pool, "insert into conversations (id) values ('single') on conflict do nothing").await?;
    ensure!(offenders(pool, WRONG).await?.is_empty());
    ensure!(world.count("select count(*) from agent_lanes").await? == 1003);
    execute(pool, "update conversations set agent = 'other'").await?;
    ensure!(offenders(pool, WRONG).await?.is_empty(), "a lane follows its conversation to another agent");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lane_that_follows_to_another_agent_stays_as_it_was() -> Result<()> {
    let world = World::new().await?;
    execute(&world.pool, "insert into agents (name) values ('other')").await?;
    world.create_conversation("c1").await?;
    world.submit("c1", "hello").await?;
    let before = world.lane("c1").await?;
    execute(&world.pool, "update conversations set agent = 'other' where id = 'c1'").await?;
    ensure!(world.lane("c1").await? == before);
    ensure!(world.count("select count(*) from agent_lanes where agent = 'other'").await? == 1);
    Ok(())
}
