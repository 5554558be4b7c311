//! What the opening of a checkpoint warns of. It is in the log, of which a thread's part is taken here.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    span,
};

/// Takes the messages of warnings.
#[derive(Clone, Debug, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut message = Message(String::new());
        event.record(&mut message);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(message.0);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// Runs `work` in this thread, and returns with its result the warnings of the log.
pub(super) fn collected<T>(work: impl FnOnce() -> T) -> (T, Vec<String>) {
    let warnings = Warnings::default();
    let result = tracing::subscriber::with_default(warnings.clone(), work);
    let taken = std::mem::take(&mut *warnings.0.lock().unwrap_or_else(PoisonError::into_inner));
    (result, taken)
}
