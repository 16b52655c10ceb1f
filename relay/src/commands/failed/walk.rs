//! The errors that users saw, walked by their index a page at a time: whose turns are failed still? Never content.

use serde::Serialize;
use shared::{
    ids::{AgentName, TurnId},
    settle::Kind,
};
use sqlx::PgConnection;
use time::OffsetDateTime;

/// Errors of one look, failed still or not.
const PAGE: i64 = 500;

/// Which failed turns are meant.
#[derive(Debug, Clone, Default)]
pub(in crate::commands) struct Wanted {
    pub(in crate::commands) agent: Option<AgentName>,
    pub(in crate::commands) kind: Option<Kind>,
}

/// A place among the errors, by time and id.
#[derive(Debug, Clone)]
pub(in crate::commands) struct Place {
    at: OffsetDateTime,
    id: String,
}

/// An error that a user saw, and whether its turn is failed still.
#[derive(Debug, Clone, Serialize)]
pub(in crate::commands) struct FailedTurn {
    pub(in crate::commands) turn_id: TurnId,
    pub(super) conversation_id: String,
    pub(super) agent: String,
    pub(super) kind: Option<String>,
    pub(super) attempts: Option<i32>,
    /// A person's retry must be told that a side effect may happen twice.
    pub(in crate::commands) needs_confirmation: bool,
    #[serde(with = "time::serde::rfc3339")]
    pub(super) failed_at: OffsetDateTime,
    pub(super) age_seconds: f64,
}

impl FailedTurn {
    /// Whether it failed for this reason.
    pub(in crate::commands) fn is(&self, kind: Kind) -> bool {
        self.kind.as_deref() == Some(kind.as_str())
    }
}

/// Which way a walk goes, and how far.
#[derive(Debug, Clone, Copy)]
pub(in crate::commands) enum Order {
    NewestFirst,
    /// None after this moment: what fails again meanwhile is not walked again.
    OldestFirst {
        until: OffsetDateTime,
    },
}

/// The next page of the walk, and whether it was the last one. Moves the place.
pub(in crate::commands) async fn next(
    connection: &mut PgConnection,
    wanted: &Wanted,
    order: Order,
    place: &mut Option<Place>,
) -> Result<(Vec<FailedTurn>, bool), sqlx::Error> {
    let page = match order {
        Order::NewestFirst => newest(&mut *connection, place.as_ref()).await?,
        Order::OldestFirst { until } => oldest(&mut *connection, place.as_ref(), until).await?,
    };
    let is_last = page.len() < usize::try_from(PAGE).unwrap_or(usize::MAX);
    let ids: Vec<String> = page.iter().map(|error| error.id.clone()).collect();
    *place = page.into_iter().next_back().or_else(|| place.take());
    Ok((failed_still(connection, wanted, &ids).await?, is_last))
}

async fn newest(connection: &mut PgConnection, place: Option<&Place>) -> Result<Vec<Place>, sqlx::Error> {
    sqlx::query_as!(
        Place,
        r#"
        select created_at as at, id from messages
        where role = 'error' and (created_at, id) < (coalesce($1, 'infinity'::timestamptz), $2)
        order by created_at desc, id desc limit $3
        "#,
        place.map(|place| place.at),
        place.map_or("", |place| place.id.as_str()),
        PAGE,
    )
    .fetch_all(connection)
    .await
}

async fn oldest(
    connection: &mut PgConnection,
    place: Option<&Place>,
    until: OffsetDateTime,
) -> Result<Vec<Place>, sqlx::Error> {
    sqlx::query_as!(
        Place,
        r#"
        select created_at as at, id from messages
        where role = 'error' and (created_at, id) > (coalesce($1, '-infinity'::timestamptz), $2) and created_at <= $4
        order by created_at, id limit $3
        "#,
        place.map(|place| place.at),
        place.map_or("", |place| place.id.as_str()),
        PAGE,
        until,
    )
    .fetch_all(connection)
    .await
}

/// Those of these errors that are wanted and whose turns are failed still, in the order of `ids`.
async fn failed_still(
    connection: &mut PgConnection,
    wanted: &Wanted,
    ids: &[String],
) -> Result<Vec<FailedTurn>, sqlx::Error> {
    sqlx::query_as!(
        FailedTurn,
        r#"
        select e.turn_id as "turn_id!: TurnId", e.conversation_id, c.agent, e.error->>'kind' as kind,
               (e.error->>'attempts')::int as attempts,
               agent_turn_has_side_effect(e.conversation_id, e.turn_id) as "needs_confirmation!",
               e.created_at as failed_at,
               extract(epoch from clock_timestamp() - e.created_at)::float8 as "age_seconds!"
        from unnest($1::text[]) with ordinality as page (id, position)
        join messages e on e.id = page.id
        join conversations c on c.id = e.conversation_id
        where ($2::text is null or c.agent = $2) and ($3::text is null or e.error->>'kind' = $3)
          and agent_turn_is_failed(e.conversation_id, e.turn_id)
        order by page.position
        "#,
        ids,
        wanted.agent.as_ref().map(AgentName::as_str),
        wanted.kind.map(Kind::as_str),
    )
    .fetch_all(connection)
    .await
}

/// The database's clock.
pub(in crate::commands) async fn now(connection: &mut PgConnection) -> Result<OffsetDateTime, sqlx::Error> {
    sqlx::query_scalar!(r#"select clock_timestamp() as "now!""#).fetch_one(connection).await
}
