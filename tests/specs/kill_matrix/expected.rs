//! What the user must see after a cell, and how many runs it may have taken.

use super::{
    cell::Cell,
    place::{Harm, Place},
};

/// An outcome, without its words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Said {
    Reply,
    Error(&'static str),
}

impl Cell {
    /// The outcomes of the conversation; empty: it is gone.
    pub(super) fn outcomes(&self) -> Vec<Said> {
        match self.harm {
            Harm::Kill | Harm::Stop => vec![self.after_a_loss()],
            Harm::Delete => vec![],
            // Whoever commits first has won.
            Harm::Cancel if matches!(self.place, Place::AmidFinish | Place::AfterFinish) => vec![Said::Reply],
            Harm::Cancel => vec![Said::Error("cancelled")],
            // Not claimed yet: both messages are answered together.
            Harm::Submit if self.place == Place::BeforeClaim => vec![Said::Reply],
            Harm::Submit => vec![Said::Reply, Said::Reply],
        }
    }

    fn after_a_loss(&self) -> Said {
        if self.effect != "side_effect" || self.commits_in_spite_of_all() {
            return Said::Reply;
        }
        match self.place {
            Place::AfterOpStart | Place::AfterTool => Said::Error("side_effect_unknown"),
            Place::AfterOpEnd | Place::BeforeFinish | Place::AmidFinish => Said::Error("interrupted"),
            _ => Said::Reply,
        }
    }

    /// A process that stands still amid its commit holds the lane against everybody, and commits when it goes on.
    pub(super) fn commits_in_spite_of_all(&self) -> bool {
        self.place == Place::AmidFinish && self.harm == Harm::Stop
    }

    /// The runs of the first turn that end on record.
    pub(super) fn runs(&self) -> i64 {
        let lost = match self.place {
            Place::BeforeClaim
            | Place::AfterClaim
            | Place::AfterPublish
            | Place::AmidLookAfter
            | Place::AfterReceive
            | Place::AfterFinish => false,
            _ => !self.commits_in_spite_of_all(),
        };
        match self.harm {
            Harm::Kill | Harm::Stop if lost && self.outcomes() == [Said::Reply] => 2,
            Harm::Submit if self.place == Place::AmidRecovery => 2,
            _ => 1,
        }
    }
}
