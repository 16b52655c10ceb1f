//! What holds for every table, index and function alike, asked of the catalog: a new one is held to it too.

use anyhow::{Result, ensure};
use tests::World;

use super::offenders;

#[tokio::test(flavor = "multi_thread")]
async fn every_table_column_index_view_and_function_says_what_it_is_for() -> Result<()> {
    let world = World::new().await?;
    let silent = offenders(
        &world.pool,
        "with ours as (
            select oid, relname, relkind from pg_class
            where relnamespace = 'public'::regnamespace and relname not like '\\_sqlx%'
              and relkind in ('r', 'v', 'i')
         )
         select relname::text from ours
         where obj_description(oid, 'pg_class') is null
         union all
         select ours.relname || '.' || a.attname from ours join pg_attribute a on a.attrelid = ours.oid
         where ours.relkind = 'r' and a.attnum > 0 and not a.attisdropped
           and col_description(ours.oid, a.attnum) is null
         union all
         select p.proname::text from pg_proc p
         where p.pronamespace = 'public'::regnamespace and obj_description(p.oid, 'pg_proc') is null
           and not exists (select from pg_depend d where d.objid = p.oid and d.deptype = 'e')",
    )
    .await?;
    ensure!(silent.is_empty(), "without a comment: {silent:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_foreign_key_that_a_delete_follows_has_its_index() -> Result<()> {
    let world = World::new().await?;
    // An index that leaves out nulls is as good: no delete looks for them.
    let slow = offenders(
        &world.pool,
        "select c.conname::text from pg_constraint c
         where c.contype = 'f' and c.connamespace = 'public'::regnamespace and not exists (
            select from pg_index i
            where i.indrelid = c.conrelid and i.indisvalid
              and (i.indkey::int2[])[0:cardinality(c.conkey) - 1] @> c.conkey
              and (i.indpred is null or pg_get_expr(i.indpred, i.indrelid) ~ '^\\(\\w+ IS NOT NULL\\)$'))",
    )
    .await?;
    ensure!(slow.is_empty(), "foreign keys without an index: {slow:?}");
    // What is found by the trigger instead of a key.
    let plan: Vec<String> = sqlx::query_scalar(
        "select indexdef from pg_indexes where tablename = 'operations' and indexdef like '%(conversation_id%'",
    )
    .fetch_all(&world.pool)
    .await?;
    ensure!(plan.len() == 1, "operations are found by their conversation: {plan:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_function_has_its_search_path_pinned() -> Result<()> {
    let world = World::new().await?;
    let loose = offenders(
        &world.pool,
        "select p.proname::text from pg_proc p
         where p.pronamespace = 'public'::regnamespace
           and not exists (select from pg_depend d where d.objid = p.oid and d.deptype = 'e')
           and not exists (select from unnest(p.proconfig) c where c like 'search_path=%')",
    )
    .await?;
    ensure!(loose.is_empty(), "without a pinned search_path: {loose:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn hot_tables_leave_room_for_updates_and_are_vacuumed_early() -> Result<()> {
    let world = World::new().await?;
    let plain = offenders(
        &world.pool,
        "select t.name from (values ('agent_lanes'), ('agent_outbox'), ('conversations')) t (name)
         join pg_class c on c.oid = t.name::regclass
         where not exists (select from unnest(c.reloptions) o where o like 'fillfactor=%')
            or not exists (select from unnest(c.reloptions) o where o like 'autovacuum_vacuum_scale_factor=%')",
    )
    .await?;
    ensure!(plain.is_empty(), "without storage parameters: {plain:?}");
    ensure!(
        world
            .count("select count(*) from pg_class where relname = 'agent_sleepers' and relpersistence = 'u'")
            .await?
            == 1,
        "who sleeps is not written to the log"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_settled_row_stays_in_the_indexes_that_it_has() -> Result<()> {
    let world = World::new().await?;
    // An index on what settle changes would make every settle write every index of the table.
    let costly = offenders(
        &world.pool,
        "select i.indexrelid::regclass::text || ' on ' || a.attname
         from pg_index i
         join pg_attribute a on a.attrelid = i.indrelid
         where i.indrelid = 'agent_outbox'::regclass
           and a.attname in ('status', 'run_id', 'attempts', 'processed_at')
           and (a.attnum = any (i.indkey::int2[])
                or pg_get_expr(i.indpred, i.indrelid) ~ ('\\m' || a.attname || '\\M'))",
    )
    .await?;
    ensure!(costly.is_empty(), "indexes that a settle would have to write: {costly:?}");
    Ok(())
}
