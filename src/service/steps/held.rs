//! A step that somebody uses: it stays planned as long as this is held.

use std::sync::Arc;

use ckfs_volume::{Attr, FsError, Ino, Volume};

use super::{
    run::Run,
    slot::{Slot, SlotState, StepContent, split},
};

/// Why there is no step to use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoStep {
    /// It is not shown, or was deleted.
    #[error("the step is not there")]
    Absent,
    /// Its storage gives no answer, or the system starts no thread.
    #[error("{0}")]
    Failed(String),
}

/// A step that was planned, as one directory in one state had it.
#[derive(Clone)]
pub struct HeldStep {
    slot: Arc<Slot>,
    content: StepContent,
}

impl HeldStep {
    /// Its number.
    pub fn number(&self) -> u64 {
        self.slot.step.number
    }

    /// A number that no other step of the run and no other state of its directory has.
    pub fn version(&self) -> u64 {
        self.slot.index
    }

    /// Its volume, or why it could not be planned.
    ///
    /// # Errors
    /// The message of the plan.
    pub fn volume(&self) -> Result<&Arc<Volume>, &str> {
        self.content.volume()
    }

    /// The attributes of its directory in the file system of the run.
    ///
    /// # Errors
    /// None: every volume has a root.
    pub fn root(&self) -> Result<Attr, FsError> {
        let attr = self.content.nodes().attr(Ino::ROOT)?;
        Ok(Attr { ino: self.slot.outer(attr.ino), ..attr })
    }

    /// Whether the content of one of its files, by its number in the run, is made at each open.
    pub fn is_live(&self, ino: Ino) -> bool {
        let (index, inner) = split(ino.0);
        index != self.slot.index || self.volume().map_or(true, |volume| volume.is_live(Ino(inner)))
    }
}

impl Run {
    /// The version of a step that is shown: see [`HeldStep::version`].
    pub fn version(&self, number: u64) -> Option<u64> {
        self.slots.of_step(number).map(|slot| slot.index)
    }

    /// The version of the step that a node of the run's file system is in.
    pub fn version_of_node(ino: Ino) -> Option<u64> {
        Some(split(ino.0).0).filter(|index| *index > 0)
    }

    /// A step of a version, if it is planned. Never waits.
    ///
    /// # Errors
    /// [`NoStep::Absent`].
    pub fn held(&self, version: u64) -> Result<Option<HeldStep>, NoStep> {
        let slot = self.slots.get(version).ok_or(NoStep::Absent)?;
        slot.note_used();
        let content = match &*slot.state.lock() {
            SlotState::Ready(content) => content.clone(),
            SlotState::Ended => return Err(NoStep::Absent),
            SlotState::Absent | SlotState::Opening => return Ok(None),
        };
        Ok(Some(HeldStep { slot, content }))
    }

    /// A step of a version. It is planned now if it is not: this may wait for its storage.
    ///
    /// # Errors
    /// [`NoStep`].
    pub fn hold(self: &Arc<Self>, version: u64) -> Result<HeldStep, NoStep> {
        let slot = self.slots.get(version).ok_or(NoStep::Absent)?;
        match self.content(&slot) {
            Ok(content) => Ok(HeldStep { slot, content }),
            Err(_) if self.slots.get(version).is_none() => Err(NoStep::Absent),
            Err(error) => {
                let number = slot.step.number;
                Err(NoStep::Failed(format!("step {number} cannot be planned now: {error}; its storage may not answer")))
            }
        }
    }
}
