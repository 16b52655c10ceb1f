//! The secret by which a remote handler proves that a run was given to it: known to it and to one process only.

use std::fmt;

use subtle::ConstantTimeEq as _;

/// The bearer token of one run's operations: 244 random bits. Never logged, `{:?}` included; never stored.
#[derive(Clone)]
pub struct OperationsToken(String);

impl OperationsToken {
    /// A fresh, random token.
    #[must_use]
    pub fn fresh() -> Self {
        Self(format!("{}{}", super::random().simple(), super::random().simple()))
    }

    /// The secret itself, for the one request that carries it.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// Whether `presented` is this token. Takes equally long wherever they differ.
    #[must_use]
    pub fn matches(&self, presented: &str) -> bool {
        self.0.as_bytes().ct_eq(presented.as_bytes()).into()
    }
}

impl fmt::Debug for OperationsToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OperationsToken")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_matches_itself_only_and_is_never_shown() {
        let (token, other) = (OperationsToken::fresh(), OperationsToken::fresh());
        assert!(token.matches(token.reveal()));
        for wrong in [other.reveal(), "", &token.reveal()[1..], &format!("{} ", token.reveal())] {
            assert!(!token.matches(wrong));
        }
        assert!(!format!("{token:?}").contains(token.reveal()));
    }
}
