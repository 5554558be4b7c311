//! Members of `config.json`. A member of the text model's own configuration has precedence.

use ckfs_checkpoint::Checkpoint;
use serde_json::Value;

use super::super::expr::{EvalError, ExprValue, NameScope};

/// The model types in `config.json`: that of the whole model, then that of the text model in it.
pub(crate) fn model_types(checkpoint: &Checkpoint) -> impl Iterator<Item = &str> {
    let dialect = checkpoint.dialect();
    dialect.model_type.iter().chain(&dialect.text_model_type).map(String::as_str)
}

/// The configurations in `config.json`: that of the text model if one is nested, then the whole one.
pub(crate) fn configs(checkpoint: &Checkpoint) -> impl Iterator<Item = &Value> {
    let config = checkpoint.config();
    let nested = checkpoint.dialect().text_config.as_deref().and_then(|name| config?.get(name));
    nested.into_iter().chain(config)
}

/// The member of `config.json` at a path. `null` is a value too: what the text model has none of is not that of the whole one.
pub(crate) fn config_member<'a>(checkpoint: &'a Checkpoint, path: &[impl AsRef<str>]) -> Option<&'a Value> {
    configs(checkpoint).find_map(|root| path.iter().try_fold(root, |value, member| value.get(member.as_ref())))
}

/// The non-negative integer `member` of `config.json`, or of its nested configuration of the text model.
pub(crate) fn config_number(checkpoint: &Checkpoint, member: &str) -> Option<u64> {
    config_member(checkpoint, &[member])?.as_u64()
}

/// Names of the members of `config.json`, and of its nested configuration of the text model.
pub(crate) fn config_members(checkpoint: &Checkpoint) -> Vec<&str> {
    configs(checkpoint).filter_map(Value::as_object).flat_map(|members| members.keys().map(String::as_str)).collect()
}

/// The member of `config.json` at a path, as a value of expressions.
pub(crate) fn config_value(checkpoint: &Checkpoint, path: &[String]) -> Option<ExprValue> {
    ExprValue::of_json(config_member(checkpoint, path)?)
}

/// `config.json` and the tensors of a checkpoint for expressions, and a few names.
pub(crate) struct ConfigScope<'a> {
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) bound: Vec<(String, ExprValue)>,
}

impl NameScope for ConfigScope<'_> {
    fn name(&self, name: &str) -> Result<ExprValue, EvalError> {
        let bound = self.bound.iter().find(|(bound, _)| bound == name);
        bound.map(|(_, value)| value.clone()).ok_or_else(|| EvalError::no_name(name))
    }

    fn config(&self, path: &[String]) -> Option<ExprValue> {
        config_value(self.checkpoint, path)
    }

    fn shape(&self, tensor: &str) -> Option<Vec<u64>> {
        self.checkpoint.find(tensor).map(|id| self.checkpoint.tensor(id).shape.to_vec())
    }
}
