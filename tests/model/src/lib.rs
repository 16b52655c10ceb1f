//! The protocol between submit, relay, broker and consumer as a model, checked in every state that it can reach.
//!
//! Real servers show what happens in the orders that a test provokes; the checker goes through all orders of a few
//! transactions, deliveries, crashes and wishes. `holds` shows that the protocol keeps every promise in all of them, and
//! `mutants` that it would not with any one of its guards left out. Nobody should weaken a `where` before its mutant has
//! been read.
//!
//! | the code | here |
//! |---|---|
//! | `submit_message`, in an application's transaction | `step::submit`: it opens, and commits or rolls back |
//! | `shared::claim` | `step::claim`: one step, and one to close an empty lane |
//! | `relay::publish`, `shared::release`, `relay::look_after` | `step::publish`: claimed, published or given back; asked for, moved on and sent again |
//! | JetStream | `step::broker` |
//! | `consumer::{nats_source, postgres_source, begin, heartbeat}` | `step::begin` |
//! | `consumer::operations` | `step::operation`: recorded, called, ended |
//! | `consumer::{finish, finisher}` | `step::finish`: committed; or the answer lost, and looked up |
//! | `shared::{settle, recovery}` | `step::settle`: found lost, then settled; the verdict is the code's own `decide` |
//! | `0008_user_actions.sql`, and deletes | `step::user` |
//!
//! A transaction is one step where its locks keep everybody out who could see it half done; where the real thing spans
//! several transactions or leaves the process, so does the model. A process may die between any two steps. Time is no
//! number here: whatever is due may be looked at now or later, and a lease is good until a step ends it. A consumer that
//! has lost its lease goes on with any step until one stops it.
//!
//! Not in the model: the text of messages and its rejection, `seq` within a conversation beyond the order of outcomes, the
//! cap on a turn's messages, policy and its changes, paused agents, prune, history, backoff and fairness, the wake-up,
//! deadlocks and old snapshots beyond those named, effects other than `side_effect`, several calls of one handler, retries
//! that the user confirmed although a side effect may be doubled, reports of tool calls after the fact, and a broker that
//! sends anything but what it was given.

#![cfg(test)]

mod actions;
mod guard;
mod holds;
mod mutants;
mod offer;
mod promises;
mod protocol;
mod scenario;
mod state;
mod step;
mod tables;
mod witness;
