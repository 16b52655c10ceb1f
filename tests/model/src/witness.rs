//! What an onlooker would have noted. No table has it, and no guard reads it: promises do that are about a moment, and not
//! about what is left of it.

use crate::state::TurnId;

/// The notes on one conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Witness {
    /// The last turn of which the user was told that it is stopped.
    pub(crate) cancelled: Option<TurnId>,
    noted: [bool; 5],
}

/// What should never be noted.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Note {
    /// A run committed an end while another held the lane, or nobody.
    Trespass,
    /// A run was taken from a living consumer whose lease was good.
    Robbery,
    /// A tool was called, and nothing told of it.
    UnrecordedCall,
    /// A run started an operation, although the user had been told that it is being stopped.
    Disobedience,
    /// An end was recorded for a run that had one.
    SecondEnd,
}

impl Witness {
    pub(crate) const fn note(&mut self, note: Note, happened: bool) {
        self.noted[note as usize] |= happened;
    }

    pub(crate) const fn never(self, note: Note) -> bool {
        !self.noted[note as usize]
    }
}
