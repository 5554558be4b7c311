//! Logical axes: a layout names the axes of its tensors, and a list of rules says which mesh axes split which logical
//! axis.
//!
//! The rules are taken in order. A rule applies to a tensor that has its logical axis. Two conditions must hold: that
//! axis has no mesh axes yet, and none of the rule's mesh axes splits another axis of the tensor. The last test comes
//! before mesh axes of size 1, and those that the mesh does not have, are dropped. So an axis that splits nothing can
//! still block a rule. Flax does the same, and only this way a checkpoint is sharded as MaxText shards it.

use serde::{Deserialize, Serialize};

use super::super::{mesh::Mesh, spec::Spec};
pub use ckfs_config::LogicalRule;

/// Rules, in the order in which they are tried.
#[derive(Clone, Debug, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LogicalRules {
    /// The rules.
    #[serde(default, rename = "rule")]
    pub rules: Vec<LogicalRule>,
}

impl LogicalRules {
    /// MaxText's rules for weights.
    ///
    /// # Panics
    /// If the embedded file is malformed, which a test excludes.
    pub fn maxtext() -> Self {
        toml::from_str(include_str!("maxtext_rules.toml")).expect("the embedded rules are well-formed")
    }

    /// Appends `rules`. They replace all earlier rules for the same logical axes.
    pub fn replace(&mut self, rules: &[LogicalRule]) {
        self.rules.retain(|rule| rules.iter().all(|new| new.logical != rule.logical));
        self.rules.extend_from_slice(rules);
    }

    /// The spec of a tensor whose axes have these names. An empty name, or a missing name at the end, is no logical
    /// axis.
    pub fn spec(&self, axes: &[String], mesh: &Mesh) -> Spec {
        let mut assigned: Vec<Option<&[String]>> = vec![None; axes.len()];
        for rule in &self.rules {
            let Some(at) = axes.iter().position(|name| *name == rule.logical) else { continue };
            let taken = assigned.iter().flatten().copied().flatten().any(|name| rule.mesh.contains(name));
            if assigned[at].is_none() && !taken {
                assigned[at] = Some(&rule.mesh);
            }
        }
        let mut spec = Spec::replicated();
        for (axis, names) in assigned.into_iter().enumerate() {
            for index in names.unwrap_or_default().iter().filter_map(|name| mesh.find(name)) {
                if mesh.axes()[index].size > 1 {
                    spec.split(axis, index);
                }
            }
        }
        spec
    }

    /// The first mesh axis that a rule names twice, after the rule's logical axis. A mesh axis cannot split one axis
    /// two times.
    pub(crate) fn doubled(&self) -> Option<(&str, &str)> {
        self.rules.iter().find_map(|rule| {
            let mut names = rule.mesh.iter().enumerate();
            let twice = names.find_map(|(at, name)| rule.mesh[..at].contains(name).then_some(name));
            twice.map(|name| (rule.logical.as_str(), name.as_str()))
        })
    }

    /// Names of all mesh axes that rules use.
    pub(crate) fn mesh_axes(&self) -> impl Iterator<Item = &str> {
        self.rules.iter().flat_map(|rule| &rule.mesh).map(String::as_str)
    }

    /// Whether some rule uses a mesh axis.
    pub fn uses(&self, mesh_axis: &str) -> bool {
        self.rules.iter().any(|rule| rule.mesh.iter().any(|name| name == mesh_axis))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(mesh: &str, axes: &str) -> String {
        let mesh = Mesh::parse(mesh).unwrap();
        let axes: Vec<String> = axes.split(' ').map(|name| name.trim_matches('_').to_owned()).collect();
        LogicalRules::maxtext().spec(&axes, &mesh).to_json(axes.len(), &mesh).to_string()
    }

    #[test]
    fn kernels_are_split_as_the_rules_say() {
        let rows = [
            ("fsdp=4,tensor=2", "vocab embed_vocab", r#"["tensor","fsdp"]"#),
            ("fsdp=4,tensor=2", "embed_attn layers q_heads kv", r#"["fsdp",null,"tensor",null]"#),
            ("fsdp=4,tensor=2", "mlp layers embed", r#"["tensor",null,"fsdp"]"#),
            ("fsdp=4,tensor=2", "norm layers", r#"["tensor",null]"#),
            ("fsdp=4,tensor=2", "_ layers", "[null,null]"),
            // Pipeline stages split the layers.
            ("stage=2,fsdp=4", "embed layers mlp", r#"["fsdp","stage",null]"#),
            // `mlp` comes before `embed` and takes fsdp_transpose. The first rule of `embed` then conflicts; its second
            // rule does not.
            ("fsdp=2,fsdp_transpose=2,tensor=2", "embed layers mlp", r#"["fsdp",null,["fsdp_transpose","tensor"]]"#),
            // `embed_attn` has one rule and no rival for fsdp_transpose.
            ("fsdp=2,fsdp_transpose=2", "embed_attn q_heads kv", r#"[["fsdp","fsdp_transpose"],null,null]"#),
            // Experts: exp takes `expert`; the other axes of a mixture do not use it.
            ("fsdp=2,expert=4", "exp layers embed_moe mlp_moe", r#"["expert",null,"fsdp",null]"#),
            ("expert=4,fsdp=2", "embed layers mlp", r#"[["fsdp","expert"],null,null]"#),
            ("fsdp=2,expert=4", "vocab embed_vocab", r#"[null,["fsdp","expert"]]"#),
            // Context parallelism shards weights like fsdp.
            ("fsdp=2,context=2,tensor=2", "embed_attn q_heads kv", r#"[["fsdp","context"],"tensor",null]"#),
            ("context=2,fsdp=2", "exp embed_moe mlp_moe", r#"[null,["fsdp","context"],null]"#),
            ("fsdp_transpose=2,tensor=2", "exp embed_moe mlp_moe", r#"[null,null,["fsdp_transpose","tensor"]]"#),
            // The order in the rule counts, not the order of the mesh.
            ("autoregressive=2,tensor=2", "vocab embed_vocab", r#"[["tensor","autoregressive"],null]"#),
            ("data=8", "vocab embed_vocab", "[null,null]"),
        ];
        for (mesh, axes, expected) in rows {
            assert_eq!(spec(mesh, axes), expected, "{axes} on {mesh}");
        }
    }

    #[test]
    fn a_mesh_axis_of_size_one_still_stands_in_the_way() {
        // `embed_attn` comes first and names fsdp_transpose, which the only rule of `gdn_head` also names.
        assert_eq!(spec("fsdp=4,tensor=2", "embed_attn layers gdn_head"), r#"["fsdp",null,null]"#);
        assert_eq!(spec("fsdp=4,tensor=2", "mlp embed_attn"), r#"[null,"fsdp"]"#);
        // Without the rival the same logical axis is split.
        assert_eq!(spec("fsdp=4,tensor=2", "gdn_head layers"), r#"["tensor",null]"#);
    }

    #[test]
    fn an_axis_named_twice_is_found() {
        let mut rules = LogicalRules::maxtext();
        assert_eq!(rules.doubled(), None);
        let mesh = ["fsdp", "tensor", "fsdp"].map(str::to_owned).to_vec();
        rules.replace(&[LogicalRule { logical: "embed".into(), mesh }]);
        assert_eq!(rules.doubled(), Some(("embed", "fsdp")));
    }

    #[test]
    fn new_rules_replace_the_old_and_come_last() {
        let mesh = Mesh::parse("fsdp=4,tensor=2").unwrap();
        let mut rules = LogicalRules::maxtext();
        rules.replace(&[
            LogicalRule { logical: "mlp".into(), mesh: vec!["fsdp".into()] },
            LogicalRule { logical: "embed".into(), mesh: vec!["tensor".into()] },
        ]);
        let axes = ["embed", "mlp"].map(str::to_owned);
        assert_eq!(rules.spec(&axes, &mesh).to_json(2, &mesh).to_string(), r#"["tensor","fsdp"]"#);
        assert_eq!(rules.rules.iter().filter(|rule| rule.logical == "embed").count(), 1);
        // As the last rule, `embed` yields to an axis that an earlier rule has given to another one.
        let axes = ["embed", "vocab"].map(str::to_owned);
        assert_eq!(rules.spec(&axes, &mesh).to_json(2, &mesh).to_string(), r#"[null,"tensor"]"#);
    }
}
