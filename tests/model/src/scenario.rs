//! How much happens: how many messages and attempts, and which faults strike and wishes are uttered. The checker tries
//! every order of them; small numbers in many scenarios find more than large ones in one.

/// Where a consumer gets its runs from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Source {
    /// Triggers that a relay published.
    Nats,
    /// It claims for itself, and begins what is queued for a broker that nobody reads.
    Postgres,
}

/// What may happen. The order in which it does is the checker's.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scenario {
    pub(crate) conversations: usize,
    /// In each conversation.
    pub(crate) messages: usize,
    pub(crate) max_attempts: u8,
    pub(crate) sources: &'static [Source],
    /// Handlers may call a tool that changes the world.
    pub(crate) tools: bool,
    pub(crate) budget: Budget,
}

/// What happens only so often, since it could for ever: a fault, or somebody's wish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Chance {
    /// An application rolls a submit back.
    Rollback,
    RelayCrash,
    ConsumerCrash,
    /// A living consumer does not renew its lease in time, and goes on.
    Stall,
    /// The broker forgets a message that it acknowledged, or an ack gets lost.
    Loss,
    /// A publish is not acknowledged; its message may be stored at any later time, or never.
    Timeout,
    /// A trigger is asked for while it is still on its way.
    Haste,
    /// A trigger cannot be published at all.
    Undeliverable,
    /// A handler says that it failed.
    Failure,
    /// A handler exceeds its deadline, and does not stop at once.
    Overrun,
    /// A consumer leaves and gives its run back.
    Shutdown,
    /// The answer to a commit is lost.
    Ambiguity,
    Cancel,
    /// `delete_message`.
    Deletion,
    /// A plain `delete from messages`.
    Erasure,
    /// `retry_turn`, where nothing needs to be confirmed.
    Retry,
    /// `mark_read`.
    Reading,
    /// A plain `delete from conversations`.
    Departure,
}

/// How often each thing may still happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Budget([u8; Chance::ALL.len()]);

impl Chance {
    pub(crate) const ALL: [Self; 18] = [
        Self::Rollback,
        Self::RelayCrash,
        Self::ConsumerCrash,
        Self::Stall,
        Self::Loss,
        Self::Timeout,
        Self::Haste,
        Self::Undeliverable,
        Self::Failure,
        Self::Overrun,
        Self::Shutdown,
        Self::Ambiguity,
        Self::Cancel,
        Self::Deletion,
        Self::Erasure,
        Self::Retry,
        Self::Reading,
        Self::Departure,
    ];
}

impl Budget {
    pub(crate) const fn left(&self, chance: Chance) -> u8 {
        self.0[chance as usize]
    }

    pub(crate) const fn allows(&self, chance: Chance) -> bool {
        self.left(chance) > 0
    }

    pub(crate) const fn spend(&mut self, chance: Chance) {
        self.0[chance as usize] -= 1;
    }
}

impl Scenario {
    /// One conversation of one message, two consumers, no tool, two attempts; nothing goes wrong.
    pub(crate) const ONE: Self = Self {
        conversations: 1,
        messages: 1,
        max_attempts: 2,
        sources: &[Source::Nats, Source::Nats],
        tools: false,
        budget: Budget([0; Chance::ALL.len()]),
    };

    /// The same with two messages, which become one turn or two.
    pub(crate) const TWO: Self = Self { messages: 2, ..Self::ONE };

    /// The same with a handler that changes the world.
    pub(crate) const fn with_a_tool(self) -> Self {
        Self { tools: true, ..self }
    }

    pub(crate) const fn of_attempts(self, max_attempts: u8) -> Self {
        Self { max_attempts, ..self }
    }

    /// Each of these may happen once, or as often as it is named.
    pub(crate) const fn where_may_happen(mut self, chances: &[Chance]) -> Self {
        let mut place = 0;
        while place < chances.len() {
            self.budget.0[chances[place] as usize] += 1;
            place += 1;
        }
        self
    }
}
