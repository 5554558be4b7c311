//! All steps of a run, by number and by slot.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use ckfs_volume::{Permission, Volume};
use parking_lot::{Mutex, RwLock};

use super::{
    settle::ListedStep,
    slot::{Slot, SlotState, StepContent},
};

/// The steps at one moment.
#[derive(Default)]
struct Inside {
    /// Slots that answer requests, by index.
    slots: BTreeMap<u64, Arc<Slot>>,
    /// Index of the slot that the root shows for a step, by the step's number.
    listed: BTreeMap<u64, u64>,
    last_index: u64,
    /// Counts changes of the newest step.
    latest_changes: u64,
}

/// All steps of a run.
#[derive(Default)]
pub(super) struct Slots {
    inside: RwLock<Inside>,
    /// Those that may be planned: few of the many that a run has, and what goes on all the time asks for these alone.
    planned: Mutex<Vec<Arc<Slot>>>,
}

/// What a comparison with the directory has changed.
#[derive(Default)]
pub(super) struct SlotChanges {
    /// Slots that are new.
    pub(super) new: Vec<Arc<Slot>>,
    /// Slots that have ended.
    pub(super) ended: Vec<Arc<Slot>>,
    /// Volumes of these.
    pub(super) volumes: Vec<Arc<Volume>>,
}

/// Slots by the number of their step.
pub(super) type SlotsByNumber = HashMap<u64, Vec<Arc<Slot>>>;

fn by_number(slots: &BTreeMap<u64, Arc<Slot>>) -> SlotsByNumber {
    let mut found = SlotsByNumber::with_capacity(slots.len());
    for slot in slots.values() {
        found.entry(slot.step.number).or_default().push(Arc::clone(slot));
    }
    found
}

/// The slot of a step in its state.
pub(super) fn same<'a>(slots: &'a SlotsByNumber, step: &ListedStep) -> Option<&'a Arc<Slot>> {
    slots.get(&step.number)?.iter().find(|slot| slot.step.is_same(step))
}

impl Slots {
    /// The slot of an index, while it answers requests.
    pub(super) fn get(&self, index: u64) -> Option<Arc<Slot>> {
        self.inside.read().slots.get(&index).cloned()
    }

    /// Notes a slot that is about to be planned. To be called without a lock of it.
    pub(super) fn note_planned(&self, slot: &Arc<Slot>) {
        self.planned.lock().push(Arc::clone(slot));
    }

    /// The slots that are planned or being planned, by index.
    pub(super) fn planned(&self) -> Vec<Arc<Slot>> {
        let mut planned = self.planned.lock();
        planned.retain(|slot| matches!(&*slot.state.lock(), SlotState::Opening | SlotState::Ready(_)));
        planned.sort_by_key(|slot| slot.index);
        planned.dedup_by_key(|slot| slot.index);
        planned.clone()
    }

    /// Slots that answer requests and that the root does not show any more.
    pub(super) fn left(&self) -> Vec<Arc<Slot>> {
        let inside = self.inside.read();
        if inside.slots.len() == inside.listed.len() {
            return Vec::new();
        }
        let is_left = |slot: &&Arc<Slot>| inside.listed.get(&slot.step.number) != Some(&slot.index);
        inside.slots.values().filter(is_left).cloned().collect()
    }

    /// The slot of a step that the root shows.
    pub(super) fn of_step(&self, number: u64) -> Option<Arc<Slot>> {
        let inside = self.inside.read();
        inside.slots.get(inside.listed.get(&number)?).cloned()
    }

    /// The slots that the root shows, by the number of their step.
    pub(super) fn listed(&self) -> Vec<Arc<Slot>> {
        let inside = self.inside.read();
        inside.listed.values().filter_map(|index| inside.slots.get(index).cloned()).collect()
    }

    /// The newest step, and a number that is another for each newest one.
    pub(super) fn latest(&self) -> Option<(u64, u64)> {
        let inside = self.inside.read();
        inside.listed.last_key_value().map(|(number, _)| (*number, inside.latest_changes))
    }

    /// The slot of the newest step that the root shows.
    pub(super) fn newest(&self) -> Option<Arc<Slot>> {
        let inside = self.inside.read();
        inside.slots.get(inside.listed.last_key_value()?.1).cloned()
    }

    /// All slots that answer requests, by the number of their step.
    pub(super) fn by_number(&self) -> SlotsByNumber {
        by_number(&self.inside.read().slots)
    }

    /// Shows these steps and no others, each with the permission of its directory: the caller has looked that up, since all requests
    /// wait for this. Steps that `are_there` but are not shown any more go on for those that use them.
    pub(super) fn show(
        &self,
        steps: &[(ListedStep, Permission)],
        are_there: &dyn Fn(&ListedStep) -> bool,
    ) -> SlotChanges {
        let mut changes = SlotChanges::default();
        let mut inside = self.inside.write();
        let before = inside.listed.last_key_value().map(|(number, _)| *number);
        let known: Vec<Arc<Slot>> = inside.slots.values().cloned().collect();
        let wanted: HashMap<u64, &ListedStep> = steps.iter().map(|(step, _)| (step.number, step)).collect();
        for slot in known {
            let is_wanted = wanted.get(&slot.step.number).is_some_and(|step| step.is_same(&slot.step));
            let is_listed = inside.listed.get(&slot.step.number) == Some(&slot.index);
            if is_wanted && is_listed {
                continue;
            }
            if is_listed {
                inside.listed.remove(&slot.step.number);
            }
            if !are_there(&slot.step) {
                inside.slots.remove(&slot.index);
                changes.ended.push(slot);
            }
        }
        let earlier = by_number(&inside.slots);
        for (step, permission) in steps {
            if inside.listed.contains_key(&step.number) {
                continue;
            }
            // A step that comes back into the window has its slot still.
            let slot = same(&earlier, step).cloned().unwrap_or_else(|| {
                inside.last_index += 1;
                let slot = Arc::new(Slot::new(inside.last_index, step.clone(), *permission));
                inside.slots.insert(slot.index, Arc::clone(&slot));
                changes.new.push(Arc::clone(&slot));
                slot
            });
            inside.listed.insert(step.number, slot.index);
        }
        let after = inside.listed.last_key_value().map(|(number, _)| *number);
        if before != after {
            inside.latest_changes += 1;
        }
        drop(inside);
        for slot in &changes.ended {
            if let Some(StepContent::Volume(volume)) = slot.set(SlotState::Ended) {
                changes.volumes.push(volume);
            }
        }
        changes
    }

    /// Ends a slot, and gives its step a new one with this content; `None` if the slot had ended, or its step is not shown.
    pub(super) fn replace(&self, old: &Slot, content: Option<StepContent>) -> Option<Arc<Slot>> {
        let mut inside = self.inside.write();
        let ended = inside.slots.remove(&old.index)?;
        let mut replaced = None;
        if inside.listed.get(&old.step.number) == Some(&old.index) {
            inside.last_index += 1;
            let slot = Arc::new(Slot::new(inside.last_index, old.step.clone(), old.permission));
            if let Some(content) = content {
                slot.set(SlotState::Ready(content));
                self.note_planned(&slot);
            }
            inside.listed.insert(slot.step.number, slot.index);
            inside.slots.insert(slot.index, Arc::clone(&slot));
            replaced = Some(slot);
        }
        drop(inside);
        drop(ended.set(SlotState::Ended));
        replaced
    }

    /// Forgets a slot that the root does not show any more and that nobody uses.
    pub(super) fn forget(&self, slot: &Slot) {
        let mut inside = self.inside.write();
        if inside.listed.get(&slot.step.number) != Some(&slot.index) {
            inside.slots.remove(&slot.index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(number: u64, stamp: u64) -> ListedStep {
        ListedStep::for_tests(number, stamp)
    }

    fn show(slots: &Slots, steps: &[ListedStep], there: &[ListedStep]) -> (Vec<u64>, Vec<u64>) {
        let is_there = |step: &ListedStep| there.iter().any(|other| other.is_same(step));
        let permission = Permission { uid: 0, gid: 0, mode: 0o555 };
        let steps: Vec<_> = steps.iter().map(|step| (step.clone(), permission)).collect();
        let changes = slots.show(&steps, &is_there);
        let numbers = |slots: &[Arc<Slot>]| slots.iter().map(|slot| slot.step.number).collect();
        (numbers(&changes.new), numbers(&changes.ended))
    }

    #[test]
    fn slots_come_and_go_with_their_steps() {
        let slots = Slots::default();
        let [one, two, three] = [step(1, 7), step(2, 7), step(3, 7)];
        let all = [one.clone(), two.clone()];
        assert_eq!(show(&slots, &all, &all), (vec![1, 2], vec![]));
        let (latest, changes) = slots.latest().unwrap();
        assert_eq!(latest, 2);
        assert_eq!(show(&slots, &all, &all), (vec![], vec![]));
        assert_eq!(slots.latest(), Some((2, changes)));
        // The window moves: step 1 is hidden, and answers those that use it.
        let first = slots.of_step(1).unwrap();
        let there = [one.clone(), two.clone(), three.clone()];
        assert_eq!(show(&slots, &there[1..], &there), (vec![3], vec![]));
        assert!(slots.of_step(1).is_none() && slots.get(first.index).is_some());
        assert!(slots.latest().unwrap().1 > changes);
        // It comes back, as when a newer one is deleted.
        assert_eq!(show(&slots, &all, &all), (vec![], vec![3]));
        assert_eq!(slots.of_step(1).unwrap().index, first.index);
        // Written anew, it is another one.
        let anew = [step(1, 8), two];
        assert_eq!(show(&slots, &anew, &anew), (vec![1], vec![1]));
        assert!(slots.get(first.index).is_none() && matches!(*first.state.lock(), SlotState::Ended));
        let second = slots.of_step(1).unwrap();
        assert!(slots.replace(&second, None).is_some() && slots.replace(&second, None).is_none());
        assert_ne!(slots.of_step(1).unwrap().index, second.index);
        assert_eq!(show(&slots, &[], &[]), (vec![], vec![2, 1]));
        assert!(slots.latest().is_none() && slots.by_number().is_empty());
    }
}
