//! x

pub mod admin;
pub mod backoff;
pub mod broker;
pub mod claim;
pub mod failpoint;
pub mod ids;
pub mod logging;
pub mod policy;
pub mod pool;
pub mod process;
pub mod recovery;
pub mod release;
pub mod schema;
pub mod settings;
pub mod settle;
pub mod sqlstate;
pub mod state;
pub mod submit;
pub mod topology;
pub mod trigger;
pub mod wake;
