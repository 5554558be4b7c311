//! Every kind of step, written in every order of files: it is never taken for finished before its last file is there.

use std::{fs, path::Path};

use super::*;

const COMMITTED: &str = r#"{"item_handlers": {"default": "h"}, "commit_timestamp_nsecs": 5}"#;

/// The files of a step, relative to the run, with their contents.
type Files = &'static [(&'static str, &'static str)];

fn write(run: &Path, file: &str, text: &str) {
    let path = run.join(file);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn listed(run: &Path) -> FoundSteps {
    StepDirectory::new(&run.display().to_string(), &OpenOptions::default()).unwrap().list().unwrap()
}

/// Calls `each` with every order of numbers below `count`.
fn orders(count: usize, each: &mut dyn FnMut(&[usize])) {
    fn place(order: &mut Vec<usize>, count: usize, each: &mut dyn FnMut(&[usize])) {
        if order.len() == count {
            return each(order);
        }
        for next in 0..count {
            if !order.contains(&next) {
                order.push(next);
                place(order, count, each);
                order.pop();
            }
        }
    }
    place(&mut Vec::new(), count, each);
}

#[test]
#[expect(clippy::too_many_lines, reason = "one row for each trainer")]
fn a_step_is_complete_with_its_last_file_in_every_order() {
    let rows: [(Files, StepKind, &str); 12] = [
        (
            &[
                ("7/_CHECKPOINT_METADATA", COMMITTED),
                ("7/default/_METADATA", "{}"),
                ("7/default/manifest.ocdbt", "m"),
                ("7/default/d/0", "x"),
            ],
            StepKind::Orbax,
            "7",
        ),
        (&[("step-7/.metadata", "m"), ("step-7/__0_0.distcp", "x")], StepKind::TorchDcp, "step-7"),
        (
            &[
                ("weight_v000007/model.safetensors.index.json", "{}"),
                ("weight_v000007/model-00000-of-00002.safetensors", "x"),
                ("weight_v000007/model-00001-of-00002.safetensors", "x"),
            ],
            StepKind::Version,
            "weight_v000007",
        ),
        (
            &[("step7/model_and_optim/.metadata", "m"), ("step7/model_and_optim/__0_0.distcp", "x")],
            StepKind::TorchDcp,
            "step7/model_and_optim",
        ),
        (
            &[
                ("m--val_loss=1.25-step=7-consumed_samples=56.0/weights/.metadata", "m"),
                ("m--val_loss=1.25-step=7-consumed_samples=56.0/weights/__0_0.distcp", "x"),
                ("m--val_loss=1.25-step=7-consumed_samples=56.0/weights/common.pt", "x"),
                ("m--val_loss=1.25-step=7-consumed_samples=56.0/weights/metadata.json", "{}"),
            ],
            StepKind::Megatron,
            "m--val_loss=1.25-step=7-consumed_samples=56.0/weights",
        ),
        (
            &[
                ("checkpoint-7/config.json", "{}"),
                ("checkpoint-7/model.safetensors", "x"),
                ("checkpoint-7/trainer_state.json", "{}"),
            ],
            StepKind::Transformers,
            "checkpoint-7",
        ),
        (
            &[
                ("checkpoint-7/pytorch_model_fsdp_0/.metadata", "m"),
                ("checkpoint-7/pytorch_model_fsdp_0/__0_0.distcp", "x"),
                ("checkpoint-7/trainer_state.json", "{}"),
            ],
            StepKind::TorchDcp,
            "checkpoint-7/pytorch_model_fsdp_0",
        ),
        (
            &[
                ("iter_0000007/.metadata", "m"),
                ("iter_0000007/__0_0.distcp", "x"),
                ("iter_0000007/common.pt", "x"),
                ("iter_0000007/metadata.json", "{}"),
                ("latest_checkpointed_iteration.txt", "7"),
            ],
            StepKind::Megatron,
            "iter_0000007",
        ),
        (
            &[
                ("iter_0000007/mp_rank_00/model_optim_rng.pt", "x"),
                ("iter_0000007/mp_rank_01/model_optim_rng.pt", "x"),
                ("latest_checkpointed_iteration.txt", "7\n"),
            ],
            StepKind::Megatron,
            "iter_0000007",
        ),
        (
            &[
                ("global_step_7/actor/model_world_size_2_rank_0.pt", "x"),
                ("global_step_7/actor/model_world_size_2_rank_1.pt", "x"),
                ("latest_checkpointed_iteration.txt", "7"),
            ],
            StepKind::RankFiles,
            "global_step_7/actor",
        ),
        (
            &[("global_step_7/policy/model_world_size_1_rank_0.pt", "x"), ("latest_ckpt_global_step.txt", "7")],
            StepKind::RankFiles,
            "global_step_7/policy",
        ),
        (
            &[
                ("global_step7/mp_rank_00_model_states.pt", "x"),
                ("global_step7/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "x"),
                ("latest", "global_step7"),
            ],
            StepKind::DeepSpeed,
            "global_step7",
        ),
    ];
    for (files, kind, path) in rows {
        orders(files.len(), &mut |order| {
            // A grid of ranks tells its extent only by what is there.
            let tells_late = files.iter().any(|(file, _)| file.contains("mp_rank_01"));
            if tells_late && order.last() == Some(&1) {
                return;
            }
            let run = tempfile::tempdir().unwrap();
            for (written, place) in order.iter().enumerate() {
                let found = listed(run.path());
                let state = found.steps.first().map(|step| step.state.clone());
                assert!(
                    !matches!(state, Some(StepState::Complete | StepState::Unmarked)),
                    "{kind}: {written} of {order:?}: {state:?}"
                );
                let (file, text) = files[*place];
                write(run.path(), file, text);
            }
            let expected =
                FoundStep { number: 7, name: String::new(), path: path.to_owned(), kind, state: StepState::Complete };
            let found = listed(run.path());
            assert_eq!(found.steps.len(), 1, "{kind}: {found:?}");
            let step = FoundStep { name: String::new(), ..found.steps[0].clone() };
            assert_eq!(step, expected, "{order:?}");
            assert!(found.is_run() && !found.is_checkpoint, "{kind}: {found:?}");
        });
    }
}

#[test]
fn what_is_missing_is_said() {
    let rows: [(Files, &str); 15] = [
        (&[("8.orbax-checkpoint-tmp-17/default/_METADATA", "{}")], ".orbax-checkpoint-tmp"),
        (&[("8/_CHECKPOINT_METADATA", r#"{"commit_timestamp_nsecs": null}"#)], "no time of commit"),
        (&[("8/_CHECKPOINT_METADATA", COMMITTED), ("8/params/_METADATA", "{}")], "the item default is missing"),
        (
            &[("8/_CHECKPOINT_METADATA", COMMITTED), ("8/default.orbax-checkpoint-tmp/_METADATA", "{}")],
            "an item that the saver has not finished",
        ),
        (&[("step-8/__0_0.distcp", "x")], "`.metadata` is missing"),
        (&[("checkpoint-8/model.safetensors", "x")], "trainer_state.json is missing"),
        (&[("tmp-checkpoint-8/model.safetensors", "x")], "its name says"),
        (&[("iter_0000008/.metadata", "m"), ("iter_0000008/__0_0.distcp", "x")], "latest_checkpointed_iteration.txt"),
        (
            &[
                ("iter_0000008/.metadata", "m"),
                ("iter_0000008/__0_0.distcp", "x"),
                ("latest_checkpointed_iteration.txt", "7"),
            ],
            "names 7 as the last finished step",
        ),
        (
            &[("global_step_8/actor/model_world_size_3_rank_2.pt", "x")],
            "expected the files of 3 ranks, found 1; missing: rank 0, 1",
        ),
        (
            &[
                ("global_step8/zero_pp_rank_1_mp_rank_00_optim_states.pt", "x"),
                ("global_step8/mp_rank_00_model_states.pt", "x"),
            ],
            "zero_pp_rank_0_*_optim_states.pt is missing",
        ),
        (&[("weights/step_8/model.safetensors", "x")], "STABLE is missing"),
        (
            &[("m--loss=1-step=8.ckpt/model.safetensors", "x"), ("m--loss=1-step=8-unfinished", "")],
            "m--loss=1-step=8-unfinished is beside it",
        ),
        (&[("8/default/checkpoint", "x")], "default: a checkpoint of Orbax or flax as until 2023"),
        (&[("8/critic/model.safetensors", "x"), ("8/other/a.bin", "x")], "with weights, critic, other, none is known"),
    ];
    for (files, expected) in rows {
        let run = tempfile::tempdir().unwrap();
        for (file, text) in files {
            write(run.path(), file, text);
        }
        let found = listed(run.path());
        let StepState::Unfinished(reason) = &found.steps[0].state else { panic!("{files:?}: {found:?}") };
        assert!(reason.contains(expected) && found.steps[0].number == 8, "{files:?}: {reason}");
    }
}

#[test]
fn steps_of_a_run_have_one_prefix() {
    let run = tempfile::tempdir().unwrap();
    for name in ["checkpoint-5", "checkpoint-10", "best-10", "runs_3", "9"] {
        write(run.path(), &format!("{name}/model.safetensors"), "x");
    }
    write(run.path(), "model.safetensors", "x");
    let found = listed(run.path());
    let names: Vec<&str> = found.steps.iter().map(|step| step.name.as_str()).collect();
    assert_eq!((names, found.is_checkpoint), (vec!["checkpoint-5", "checkpoint-10"], true));
    // A finished step counts, and not the directory in which it is written anew.
    let run = tempfile::tempdir().unwrap();
    for name in ["7", "7.orbax-checkpoint-tmp"] {
        write(run.path(), &format!("{name}/_CHECKPOINT_METADATA"), r#"{"commit_timestamp_nsecs": 5}"#);
        write(run.path(), &format!("{name}/_METADATA"), "{}");
        write(run.path(), &format!("{name}/a.b/.zarray"), "{}");
    }
    let found = listed(run.path());
    assert_eq!((found.steps.len(), &found.steps[0].state), (1, &StepState::Complete));
    let prefixed = tempfile::tempdir().unwrap();
    for number in [3, 20] {
        write(prefixed.path(), &format!("my_model_{number}/model.safetensors"), "x");
    }
    let found = listed(prefixed.path());
    assert_eq!(found.steps.iter().map(|step| step.number).collect::<Vec<_>>(), [3, 20]);
    assert!(found.steps.iter().all(|step| step.state == StepState::Unmarked && step.kind == StepKind::Repository));
}

#[test]
fn a_repository_may_be_below_a_step() {
    let rows: [(Files, &[(u64, &str)]); 4] = [
        (
            &[
                ("000100/pretrained_model/model.safetensors", "x"),
                ("000100/training_state/optimizer_state.safetensors", "x"),
            ],
            &[(100, "000100/pretrained_model")],
        ),
        (
            &[
                ("epoch_0_step_9/model/shard-00001-model-00001-of-00001.safetensors", "x"),
                ("epoch_1_step_19/model/shard-00001-model-00001-of-00001.safetensors", "x"),
                ("epoch_1_step_19/model/consolidated/model.safetensors", "x"),
                ("epoch_1_step_19/optim/.metadata", "m"),
            ],
            &[(9, "epoch_0_step_9/model"), (19, "epoch_1_step_19/model/consolidated")],
        ),
        // The last one is saved a second time.
        (
            &[("m--loss=1-step=7/model.safetensors", "x"), ("m--loss=1-step=7-last/model.safetensors", "x")],
            &[(7, "m--loss=1-step=7")],
        ),
        (
            &[("epoch=0-step=30.ckpt/model.safetensors", "x"), ("epoch=0-step=30-last.ckpt/model.safetensors", "x")],
            &[(30, "epoch=0-step=30.ckpt")],
        ),
    ];
    for (files, expected) in rows {
        let run = tempfile::tempdir().unwrap();
        for (file, text) in files {
            write(run.path(), file, text);
        }
        let found = listed(run.path());
        let steps: Vec<_> = found.steps.iter().map(|step| (step.number, step.path.as_str())).collect();
        assert_eq!(steps, expected);
        assert!(found.steps.iter().all(|step| step.state == StepState::Unmarked), "{found:?}");
    }
}

#[test]
fn of_two_directories_with_one_number_none_is_chosen() {
    let run = tempfile::tempdir().unwrap();
    for name in ["100000", "00100000", "0200000", "200000.tmp"] {
        write(run.path(), &format!("{name}/model.safetensors"), "x");
    }
    let found = listed(run.path());
    let said = "00100000 and 100000 both have this number: rename or move one of them";
    assert_eq!(found.steps[0].state, StepState::Unfinished(said.to_owned()));
    assert_eq!((found.steps.len(), &found.steps[1].state), (2, &StepState::Unmarked));
}

/// From the directory above, where its file `latest` names the files of ranks, their configuration is read too.
#[test]
fn deepspeed_in_a_step_is_read_by_its_latest() {
    let run = tempfile::tempdir().unwrap();
    for tag in ["global_step10", "global_step9", "other"] {
        write(run.path(), &format!("checkpoint-10/{tag}/mp_rank_00_model_states.pt"), "x");
        write(run.path(), &format!("checkpoint-10/{tag}/zero_pp_rank_0_mp_rank_00_optim_states.pt"), "x");
    }
    write(run.path(), "checkpoint-10/trainer_state.json", "{}");
    let path = || listed(run.path()).steps[0].path.clone();
    assert_eq!(path(), "checkpoint-10/global_step10");
    write(run.path(), "checkpoint-10/latest", "other\n");
    assert_eq!(path(), "checkpoint-10");
    fs::remove_file(run.path().join("checkpoint-10/other/mp_rank_00_model_states.pt")).unwrap();
    let found = listed(run.path());
    assert!(matches!(&found.steps[0].state, StepState::Unfinished(reason) if reason.contains("_model_states.pt")));
}

#[test]
fn prime_rl_is_known_by_its_mark() {
    let run = tempfile::tempdir().unwrap();
    write(run.path(), "weights/step_5/model.safetensors", "x");
    write(run.path(), "weights/step_5/STABLE", "");
    write(run.path(), "weights/step_10/model.safetensors", "x");
    write(run.path(), "rollouts/step_5/data.bin", "x");
    let found = listed(run.path());
    assert_eq!(found.directory, "weights");
    assert_eq!((&found.steps[0].state, found.steps[0].path.as_str()), (&StepState::Complete, "weights/step_5"));
    assert!(matches!(&found.steps[1].state, StepState::Unfinished(reason) if reason.contains("STABLE")));
    write(run.path(), "checkpoints/step_5/trainer/.metadata", "m");
    write(run.path(), "checkpoints/step_5/trainer/__0_0.distcp", "x");
    let found = listed(&run.path().join("checkpoints"));
    assert_eq!((found.steps[0].kind, found.steps[0].path.as_str()), (StepKind::TorchDcp, "step_5/trainer"));
}

#[test]
fn a_measure_tells_changes_and_no_hard_links() {
    let run = tempfile::tempdir().unwrap();
    write(run.path(), "step-5/.metadata", "m");
    write(run.path(), "step-5/a/__0_0.distcp", "xyz");
    let measure = || {
        let directory = StepDirectory::new(&run.path().display().to_string(), &OpenOptions::default()).unwrap();
        directory.list_some((&FoundSteps::default(), &|_| false), &|_| true).unwrap().1[0].clone().unwrap()
    };
    let first = measure();
    assert_eq!((first.bytes, first.files), (4, 2));
    assert_eq!(measure(), first);
    fs::hard_link(run.path().join("step-5/.metadata"), run.path().join("best")).unwrap();
    assert_eq!(measure().stamp, first.stamp);
    write(run.path(), "step-5/eval.json", "{}");
    assert!(measure().stamp != first.stamp && measure().contains(&first));
    write(run.path(), "step-5/a/__0_0.distcp", "abc");
    assert!(measure().stamp != first.stamp && !measure().contains(&first));
}

#[test]
fn what_is_no_run_is_refused() {
    let run = tempfile::tempdir().unwrap();
    write(run.path(), "file", "x");
    let open = |source: String| StepDirectory::new(&source, &OpenOptions::default());
    let error = open(run.path().join("file").display().to_string()).err().unwrap().to_string();
    assert!(error.contains("expected the directory of a run") && error.ends_with("found a file"), "{error}");
    assert!(open(run.path().join("absent").display().to_string()).is_err());
    assert!(!listed(run.path()).is_run());
}

#[test]
fn a_finished_step_that_did_not_change_is_not_looked_into() {
    let run = tempfile::tempdir().unwrap();
    let run = run.path();
    write(run, "latest_checkpointed_iteration.txt", "8");
    for step in ["iter_0000007", "iter_0000008"] {
        for file in [".metadata", "__0_0.distcp", "common.pt", "metadata.json"] {
            write(run, &format!("{step}/{file}"), "x");
        }
    }
    let directory = StepDirectory::new(&run.display().to_string(), &OpenOptions::default()).unwrap();
    let before = directory.list().unwrap();
    let states = |holds: &dyn Fn(&str) -> bool| -> Vec<bool> {
        let (found, _) = directory.list_some((&before, holds), &|_| false).unwrap();
        found.steps.iter().map(|step| step.state == StepState::Complete).collect()
    };
    for step in ["iter_0000007", "iter_0000008"] {
        fs::remove_file(run.join(step).join(".metadata")).unwrap();
    }
    assert_eq!(states(&|_| true), [true, true]);
    assert_eq!(states(&|name| name == "iter_0000007"), [true, false]);
    // By a tracker that goes back they may be those of another writing.
    write(run, "latest_checkpointed_iteration.txt", "9");
    assert_eq!(states(&|_| true), [true, true]);
    write(run, "latest_checkpointed_iteration.txt", "7");
    assert_eq!(states(&|_| true), [false, false]);
}
