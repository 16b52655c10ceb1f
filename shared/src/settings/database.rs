//! Where Postgres is.

use std::{fmt, str::FromStr};

use sqlx::postgres::PgConnectOptions;

use super::{
    Checks,
    secret::{Refused, SecretUrl, SecretUrlParser},
};

/// Flags and variables of [`DatabaseSettings`].
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Database")]
pub struct DatabaseArgs {
    /// URL of the database; with a password, by the environment only.
    #[arg(id = "database-url", long, env = "DATABASE_URL", hide_env_values = true, value_name = "URL", value_parser = SecretUrlParser)]
    url: Option<SecretUrl>,
    /// File that holds the URL instead.
    #[arg(id = "database-url-file", long, env = "DATABASE_URL_FILE", value_name = "PATH")]
    url_file: Option<String>,
}

/// Where Postgres is, and as whom to go there.
#[derive(Clone, PartialEq, Eq)]
pub struct DatabaseSettings {
    /// `postgres://user:password@host:port/database?options`: a secret, which `Debug` leaves out.
    pub url: String,
}

impl fmt::Debug for DatabaseSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DatabaseSettings").finish_non_exhaustive()
    }
}

impl DatabaseArgs {
    /// Takes the URL from its variable or its file, and sees that it is one.
    pub fn check(&self, checks: &mut Checks) -> DatabaseSettings {
        let (url, file) = (self.url.as_ref(), self.url_file.as_ref());
        let given = checks.secret_url_or_file(("DATABASE_URL", url), ("DATABASE_URL_FILE", file));
        match &given {
            Ok(None) => checks.problem("DATABASE_URL", "is missing: set it, or DATABASE_URL_FILE"),
            Ok(Some(url)) if PgConnectOptions::from_str(url).is_err() => {
                checks.problem("DATABASE_URL", "must be a URL such as postgres://user@host:5432/database");
            }
            Ok(Some(_)) | Err(Refused) => {}
        }
        DatabaseSettings { url: given.ok().flatten().unwrap_or_default() }
    }
}
