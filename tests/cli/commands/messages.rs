//! What the program proposes after a mistake, and what it prints for programs.

use super::*;

#[test]
fn near_names_are_proposed_wherever_a_name_is_typed() {
    let fixture = Fixture::new();
    fixture.write("key.toml", "source = \"model\"\nmehs = \"fsdp=2\"\n");
    fixture.write("function.toml", "name = 'x'\n[[leaf]]\nto = 'a'\nfrom = 'b'\nview = 'transpse(x)'\n");
    fixture.write("name.toml", "name = 'x'\n[vars]\nhead_dim = '1'\n[[leaf]]\nto = 'a{hed_dim}'\nfrom = 'b'\n");
    fixture.write("field.toml", "name = 'x'\n[[leaf]]\nto = 'a'\nform = 'b'\n");
    fixture.write("group.toml", "name = 'x'\n[group]\nlayers = []\n[[place]]\ngroup = 'layer'\n");
    fixture
        .write("param.toml", "name = 'x'\n[params]\nvocab_size = '1'\n[[leaf]]\nto = 'a'\nfrom = 'lm_head.weight'\n");
    let rows: &[(i32, &[&str], &str)] = &[
        (2, &["plan", "model", "--layout", "maxtxt"], "unknown layout `maxtxt`; did you mean `maxtext`?"),
        (2, &["plan", "model", "--dtype", "bf61"], "unknown dtype `bf61`; did you mean `bf16`?"),
        (2, &["plan", "model", "--shard", "atuo"], "unknown sharding `atuo`; did you mean `auto`?"),
        (2, &["plan", "model", "--mseh", "fsdp=2"], "a similar argument exists: '--mesh'"),
        (2, &["plam", "model"], "some similar subcommands exist: 'explain', 'plan'"),
        (2, &["mount", "model", "mnt", "-o", "alow_other"], "unknown option `alow_other`; did you mean `allow_other`?"),
        (1, &["plan", "modle"], "did you mean `model`?"),
        (1, &["plan", "model", "--mesh", "fdsp=2"], "did you mean \"fsdp\"?"),
        (2, &["plan", "--config", "key.toml"], "unknown field `mehs`; did you mean `mesh`?"),
        (1, &["plan", "model", "--layout", "function.toml"], "unknown function `transpse`; did you mean `transpose`?"),
        (1, &["plan", "model", "--layout", "name.toml"], "unknown name `hed_dim`; did you mean `head_dim`?"),
        (1, &["plan", "model", "--layout", "field.toml"], "unknown field `form`; did you mean `from`?"),
        (1, &["plan", "model", "--layout", "group.toml"], "unknown group `layer`; did you mean `layers`?"),
        (
            1,
            &["plan", "model", "--layout", "param.toml", "--set", "vocabsize=3"],
            "unknown parameter `vocabsize`; did you mean `vocab_size`?",
        ),
        (1, &["cat", "model", "dev0/embd"], "dev0 has no \"embd\"; did you mean `dev0/embed`?"),
        (1, &["explain", "model", "dev0/layer/scaned/wq"], "did you mean `dev0/layers/scanned/wq`?"),
        (
            1,
            &["export", "model", "out", "--only", "dev0/embd"],
            "no file matches dev0/embd; did you mean `dev0/embed`?",
        ),
        (1, &["export", "model", "out", "--only", "safetensrs/dev*"], "did you mean `safetensors/dev*`?"),
        (1, &["plan", "--config", "keys.toml"], "did you mean `key.toml`?"),
        (1, &["plan", "model", "--layout", "./gruop.toml"], "group.toml`?"),
        (1, &["plan", "model", "--shard", "ky.toml"], "key.toml`?"),
        (1, &["verify", "model", "--only", "hf/confg.json"], "did you mean `hf/config.json`?"),
        (1, &["sums", "model", "--only", "fulll"], "did you mean `full`?"),
    ];
    for (code, args, message) in rows {
        println!("{args:?}");
        let ran = fixture.run(args);
        assert_eq!(ran.code, *code, "{}", ran.err);
        assert!(ran.err.contains(message), "expected {message:?}, found: {}", ran.err);
    }
    assert!(!fixture.path("out").exists());
}

#[test]
fn a_mesh_in_pieces_and_devices_that_it_lacks_are_told_once() {
    let fixture = Fixture::new();
    let one_mesh = "there is one mesh, its axes separated by commas: --mesh fsdp=4,tensor=2";
    let rows: &[(i32, &[&str], &str)] = &[
        (2, &["plan", "model", "--mesh", "fsdp=4", "tensor=2"], one_mesh),
        (2, &["plan", "--mesh", "fsdp=4,", "tensor=2", "model"], one_mesh),
        (2, &["plan", "model", "--mesh", "fsdp=4", "--mesh", "tensor=2"], one_mesh),
        (2, &["plan", "model", "--mesh=fsdp=4", "--mesh=tensor=2"], one_mesh),
        (2, &["plan", "model", "again", "--mesh", "fsdp=4"], "unexpected argument 'again'"),
        (
            1,
            &["plan", "model", "--devices", "0-1000", "--mesh", "fsdp=4"],
            "error: --devices 0-1000: mesh fsdp=4 has 4 devices, 0 to 3\n",
        ),
        (1, &["plan", "model", "--devices", "0-3"], "--devices 0-3: there is no --mesh, so there is one device, 0\n"),
    ];
    for (code, args, message) in rows {
        let ran = fixture.run(args);
        assert_eq!(ran.code, *code, "{args:?}: {}", ran.err);
        assert!(ran.err.contains(message), "{args:?}: expected {message:?}, found: {}", ran.err);
    }
}

/// What is typed out of habit from other programs, or one word off, is answered with what to type here.
#[test]
#[expect(clippy::too_many_lines, reason = "a row for each mistake")]
fn what_is_nearly_right_is_answered_with_what_is_right() {
    let fixture = Fixture::new();
    fixture.write("other.toml", "source = \"model\"\nallow_other = true\n");
    fixture.write("under.toml", "source = \"model\"\n[mount]\nlayout = \"hf\"\n");
    fixture.write("mesh.toml", "source = \"model\"\nmesh = 4\n");
    fixture.write("name.toml", "source = \"model\"\nmesh = { \"a=1,b\" = 2 }\n");
    let pickled = fixture.path("pickled");
    for adapter in ["pickled", "empty"] {
        fs::create_dir(fixture.path(adapter)).unwrap();
        fixture.write(&format!("{adapter}/adapter_config.json"), r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 4}"#);
    }
    fs::write(pickled.join("adapter_model.bin"), "x").unwrap();
    write_model(&fixture.path("early"));
    fixture.write("early/config.json", "{\"hidden_size\": 48, \"num");
    let hub = fixture.path("hub");
    fs::create_dir_all(hub.join("models--Meta-Llama--Llama-3.1-8B/snapshots")).unwrap();
    let rows: &[(i32, &[&str], &str)] = &[
        (2, &["mount", "model", "mnt", "-o", "mesh=fsdp=4,tensor=2"], "in a mesh also \":\": mesh=fsdp=4:tensor=2\n"),
        (2, &["plan", "model", "--revision", "main"], "the revision is part of the name: org/name@main\n"),
        (2, &["plan", "model", "--revision=v2"], "the revision is part of the name: org/name@v2\n"),
        (2, &["plan", "model", "--tp", "2"], "the mesh has it: --mesh tensor=2\n"),
        (2, &["plan", "model", "--tensor-parallel-size", "4"], "the mesh has it: --mesh tensor=4\n"),
        (2, &["plan", "model", "--format", "npy"], "a mount has every format, each as a directory"),
        (2, &["plan", "--config", "other.toml"], "other.toml:2: `allow_other` belongs under [mount]\n"),
        (2, &["plan", "--config", "under.toml"], "`layout` belongs before the first table, or under [view.NAME]\n"),
        (2, &["plan", "--config", "mesh.toml"], "expected a text such as \"fsdp=4,tensor=2\", or a table of sizes"),
        (2, &["plan", "--config", "name.toml"], "mesh: expected names of axes"),
        (
            2,
            &["mount", "-mesh", "fsdp=4", "model", "mnt"],
            "unexpected argument '-mesh': it is --mesh, with two dashes\n",
        ),
        (2, &["plan", "model", "--rank", "3"], "it is --devices 3\n"),
        (2, &["plan", "model", "--cast=bf16"], "it is --dtype bf16\n"),
        (2, &["plan", "model", "-l", "hf"], "it is --layout hf\n"),
        (2, &["plan", "model", "-chf.toml"], "it is --config hf.toml\n"),
        (2, &["export", "model", "--output", "d"], "a word of its own: ckfs export SOURCE d\n"),
        (2, &["plan", "model", "--token", "x"], "--token-file FILE"),
        (2, &["mount", "model", "mnt", "--read-only"], "every mount is read-only: leave it out\n"),
        (2, &["serve", "model", "--port", "80"], "it is --listen ADDRESS:PORT: --listen 127.0.0.1:80\n"),
        (
            2,
            &["plan", "--dequantize", "bf16", "model"],
            "the value of --dequantize stands after =: --dequantize=bf16\n",
        ),
        (2, &["version"], "it is `ckfs --version`\n"),
        (2, &["help", "mont"], "it is `ckfs help mount`\n"),
        (2, &["cache", "clean"], "it is `ckfs cache prune`\n"),
        (2, &["plan", "model", "--mesh", "4"], "expected name=size, found \"4\": for example fsdp=4\n"),
        (2, &["plan", "model", "--mesh", ""], "expected a value, found nothing: is a variable of a script not set?\n"),
        (2, &["mount", "model", "mnt", "-o", "mesh="], "expected a value, found nothing"),
        (2, &["plan", "model", "--layout", "huggingface"], "unknown layout `huggingface`; did you mean `hf`?\n"),
        (
            1,
            &["plan", "model", "--layout", "vllm", "--set", "family=vllm/llama", "--mesh", "fsdp=2"],
            "no rule splits by it; the layout splits by tensor, tp, as in tensor=2",
        ),
        (
            1,
            &["plan", "model", "--layout", "hf", "--quantize", "int4-g40"],
            "the weights have 4 columns, for int4-g40 expected a multiple of 40; int8-channel",
        ),
        (
            1,
            &["plan", "model", "--include", "{a,b}"],
            "matches no tensor; in patterns * is any text, ? one character, {0-3} any",
        ),
        (1, &["export", "model", "out", "--only", "[a]*"], "no file matches [a]*; in patterns * is any text"),
        (1, &["cat", "model", "layers/scanned/wq"], "did you mean `full/layers/scanned/wq`?\n"),
        (1, &["explain", "model", "wq"], "did you mean `full/layers/scanned/wq`?\n"),
        (1, &["plan", "s3:/x"], "did you mean `s3://x`?\n"),
        (1, &["plan", "early/config.jsn"], "did you mean `early/config.json`?\n"),
        (1, &["plan", "pikled/adapter_model.bin"], "did you mean `pickled/adapter_model.bin`?\n"),
        (1, &["plan", "model", "--layout", "my_own_layout.toml"], "my_own_layout.toml: no such file\n"),
        (
            1,
            &["plan", "model", "--layout", "my_own_layout.toml"],
            " has mesh.toml, name.toml, other.toml, under.toml\n",
        ),
        (1, &["plan", "model", "--layout", "no/x.toml"], "no/x.toml: no such file\n  there is no directory "),
        (1, &["plan", "model", "--log-file", "/no/such/x"], "log file /no/such/x: no such directory: /no/such\n"),
        (
            1,
            &["plan", "model", "--lora", "pickled"],
            "found adapter_model.bin, a pickle, which is not read: load it with peft",
        ),
        (1, &["plan", "model", "--lora", "empty"], "expected adapter_model.safetensors beside it, found none"),
        (1, &["plan", "early"], "config.json: the file ends early, at line 1 column 24: it is not complete"),
        (1, &["explain", "model", "dev9/embed", "--mesh", "fsdp=2"], "has no dev9: 2 devices, dev0 to dev1\n"),
        (1, &["plan", "https://huggingface.co/org/name"], "a page of the Hub: give org/name\n"),
        (1, &["plan", "https://huggingface.co/org/name/tree/v1/"], "a page of the Hub: give org/name@v1\n"),
    ];
    for (code, args, message) in rows {
        let ran = fixture.run(args);
        assert_eq!(ran.code, *code, "{args:?}: {}", ran.err);
        assert!(ran.err.contains(message), "{args:?}: expected {message:?}, found: {}", ran.err);
    }
    let in_cache = ran(program().args(["plan", "meta-llama/llama-3.1-8b"]).env("HF_HUB_CACHE", &hub));
    in_cache.fails(1, "models--meta-llama--llama-3.1-8b: no; it has `Meta-Llama/Llama-3.1-8B`\n");
    let near = ran(program().args(["plan", "meta-llama/Llama-31-8B"]).env("HF_HUB_CACHE", &hub));
    near.fails(1, "did you mean `Meta-Llama/Llama-3.1-8B`?\n");
    // The nearest path is told before the Hub is asked.
    let mut asks = program();
    asks.args(["plan", "modle", "--source-timeout", "1s", "--allow-http"]).current_dir(fixture.directory.path());
    let asked = ran(asks.env("HF_ENDPOINT", "http://127.0.0.1:1").env("HF_HUB_OFFLINE", "0"));
    let first = "ckfs: modle: no such file or directory; did you mean `model`?\n";
    assert!(asked.code == 1 && asked.err.starts_with(first), "{}", asked.err);
    // No other flag is proposed for one that is far from all.
    for flag in ["--format", "--tp", "--revision", "--nonsense"] {
        let ran = fixture.run(&["plan", "model", flag, "x"]);
        assert!(ran.code == 2 && !ran.err.contains("similar") && ran.err.contains(flag), "{}", ran.err);
    }
    fixture.write("table.toml", "source = \"model\"\nmesh = { tensor = 3, fsdp = 2 }\n");
    let plan = fixture.run(&["plan", "--config", "table.toml"]).ok().text();
    assert!(plan.contains("tensor=3,fsdp=2"), "{plan}");
}

#[test]
fn errors_in_files_show_the_marked_line() {
    let fixture = Fixture::new();
    fixture.write("a.toml", "source = \"model\"\n\nmehs = \"fsdp=2\"\n");
    let ran = fixture.run(&["plan", "--config", "a.toml"]).fails(2, "a.toml:3: unknown field `mehs`");
    assert_eq!(
        ran.err,
        "ckfs: error: a.toml:3: unknown field `mehs`; did you mean `mesh`?\n --> a.toml:3:1\n  |\n3 | mehs = \"fsdp=2\"\n  | ^^^^\n"
    );
    // All problems of a layout file at once, each with its line. Colours are for terminals only.
    fixture.write("l.toml", "name = 'x'\n[vars]\na = '1 + '\nb = 'rnak(c)'\n");
    let ran = fixture.run(&["plan", "model", "--layout", "l.toml"]).fails(1, "2 problems:\n");
    let path = fixture.path("l.toml").canonicalize().unwrap().display().to_string();
    for (place, line, mark) in
        [(format!("{path}:3:10"), "3 | a = '1 + '", "^"), (format!("{path}:4:6"), "4 | b = 'rnak(c)'", "^^^^")]
    {
        assert!(ran.err.contains(&format!("--> {place}\n")) && ran.err.contains(line), "{}", ran.err);
        assert!(ran.err.lines().any(|text| text.ends_with(&format!(" {mark}"))), "{}", ran.err);
    }
    assert!(!ran.err.contains('\u{1b}'), "{:?}", ran.err);
}

#[test]
fn json_of_sums_verify_and_export() {
    let fixture = Fixture::new();
    let only = ["--only", "dev0/embed", "--json"];
    let sums = fixture.run(&[&["sums", "model", "--mesh", "fsdp=2"][..], &only].concat()).ok().json();
    assert_eq!(sums["files"][0]["path"], "dev0/embed");
    assert_eq!(sums["files"][0]["sha256"].as_str().unwrap().len(), 64);
    assert_eq!(sums["source_files"].as_array().unwrap().last().unwrap()["path"], "model.safetensors");
    assert_eq!((&sums["revision"], &sums["only"]), (&json!(null), &json!(["dev0/embed"])));
    assert_eq!(sums["views"], json!(["mesh=fsdp=2 layout=canonical dtype=keep"]));

    fixture.run(&["sums", "model", "--mesh", "fsdp=2", "-o", "a.sums"]).ok();
    let check = |mesh| fixture.run(&["sums", "model", "--mesh", mesh, "--check", "a.sums", "--only", "full", "--json"]);
    let same = check("fsdp=2").ok().json();
    assert_eq!((&same["differences"], &same["source_files"]), (&json!([]), &json!(2)));
    let text = fs::read_to_string(fixture.path("a.sums")).unwrap();
    let embed = text.lines().find(|line| line.ends_with("  full/embed")).unwrap();
    fixture.write("a.sums", &text.replace(embed, &format!("{}  full/embed", "0".repeat(64))));
    let other = check("fsdp=2");
    assert_eq!(other.code, 1, "{}", other.err);
    assert!(other.err.starts_with("ckfs: error: 1 difference from a.sums"), "{}", other.err);
    let row = json!({"path": "full/embed", "source": false, "expected": "0".repeat(64), "found": &embed[..64]});
    assert_eq!(other.json()["differences"], json!([row]));
    let verified = fixture.run(&["verify", "model", "--mesh", "fsdp=2", "--sums", "a.sums", "--json"]);
    assert_eq!((verified.code, verified.json()["differences"].as_array().unwrap().len()), (1, 1));

    let out = fixture.run(&["export", "model", "out", "--mesh", "fsdp=2", "--json"]).ok().json();
    assert_eq!(out["directory"], json!(fixture.path("out").display().to_string()));
    for key in ["files", "bytes", "directories", "links"] {
        assert!(out[key].as_u64().unwrap() > 0, "{out}");
    }
    let verified = fixture.run(&["verify", "out", "--json"]).ok().json();
    assert_eq!((&verified["differences"], &verified["first_differences"]), (&json!(0), &json!([])));
    assert!(verified["files"].as_u64().unwrap() > 0 && verified["bytes"].as_u64().unwrap() > 0, "{verified}");
    let wrong = fixture.path("out/dev1/layers/scanned/wq");
    let mut bytes = fs::read(&wrong).unwrap();
    bytes[17] ^= 0x40;
    fs::write(&wrong, &bytes).unwrap();
    let verified = fixture.run(&["verify", "out", "--json"]);
    assert!(verified.code == 1 && verified.err.contains("1 difference in "), "{}", verified.err);
    assert_eq!(verified.json()["differences"], json!(1));
    assert_eq!(verified.json()["first_differences"][0]["path"], "dev1/layers/scanned/wq");
    let refused = fixture.run(&["sums", "model", "--json", "-o", "b.sums"]);
    assert!(refused.code == 2 && refused.json()["error"]["exit_code"] == json!(2), "{}", refused.text());
    assert!(refused.json()["error"]["message"].as_str().unwrap().contains("cannot be used with"), "{}", refused.text());
}

#[test]
fn json_has_the_number_of_its_schema_and_errors_are_json() {
    let fixture = Fixture::new();
    for args in [
        &["plan", "model"][..],
        &["explain", "model", "dev0/embed"],
        &["doctor"],
        &["fetch", "model"],
        &["sums", "model"],
    ] {
        let found = fixture.run(&[args, &["--json"]].concat());
        assert_eq!(
            found.json().as_object().unwrap().iter().next().unwrap(),
            (&"schema".to_owned(), &json!(1)),
            "{args:?}"
        );
    }
    // Where nothing is there, the keys are those that are there otherwise.
    let keys = |args: &[&str]| -> Vec<String> {
        let found = fixture.run(&[args, &["--json"]].concat()).ok().json();
        assert!(found["objects"] == json!([]) || found["objects"] == json!(0) || found["objects"].is_null(), "{found}");
        found.as_object().unwrap().keys().map(String::clone).collect()
    };
    assert_eq!(
        keys(&["fetch", "model"]),
        [
            "schema",
            "source",
            "is_local",
            "needed_bytes",
            "fetched_bytes",
            "cached_bytes",
            "requests",
            "part_files",
            "shared"
        ]
    );
    let listed = ["schema", "directory", "used_bytes", "limit_bytes", "objects"];
    let verified = ["schema", "objects", "with_digest", "parts", "without_digest", "damages"];
    let pruned = ["schema", "removed", "freed_bytes", "in_use"];
    for (action, expected) in
        [(&[][..], &listed[..]), (&["list"], &listed), (&["verify"], &verified), (&["prune"], &pruned)]
    {
        assert_eq!(keys(&[&["cache", "--cache-dir", "none"][..], action].concat()), expected, "{action:?}");
    }
    let status = fixture.run(&["status", "model", "--json"]);
    let error = &status.json()["error"];
    assert!(status.code == 1 && error["message"].as_str().unwrap().ends_with("no ckfs mount"), "{error}");
    assert!(
        status.err.starts_with("ckfs: error: ") && status.err.contains(error["message"].as_str().unwrap()),
        "{}",
        status.err
    );
    let usage = fixture.run(&["plan", "model", "--nonsense-flag", "--json"]);
    assert_eq!((usage.code, &usage.json()["error"]["exit_code"]), (2, &json!(2)));
    // A check that fails has one document, and no second one.
    fixture.run(&["export", "model", "out"]).ok();
    fs::write(fixture.path("out/dev0/embed"), [0; 48]).unwrap();
    let verified = fixture.run(&["verify", "out", "--json"]);
    assert_eq!((verified.code, &verified.json()["differences"], verified.json().get("error")), (1, &json!(1), None));
    // Without the flag there is no JSON.
    assert_eq!(fixture.run(&["plan", "nowhere"]).text(), "");
}

#[test]
fn help_has_its_commands_in_groups_and_every_option_once() {
    let text = |args: &[&str]| ran(program().args(args)).ok().text();
    let help = text(&["--help"]);
    let at = |part: &str| help.find(part).unwrap_or_else(|| panic!("{part:?} in {help}"));
    let order = [
        "\nMount:\n  mount  ",
        "\nLook:\n  plan  ",
        "\nMove:\n  export  ",
        "\nTrust:\n  verify  ",
        "\nHost:\n  doctor  ",
    ];
    assert!(order.windows(2).all(|pair| at(pair[0]) < at(pair[1])), "{help}");
    for kind in [
        "Hugging Face repository",
        "Orbax",
        "torch.distributed.checkpoint",
        "DeepSpeed",
        "Megatron",
        ".pt",
        "s3://",
        "--steps",
    ] {
        at(kind);
    }
    let options = text(&["help", "options"]);
    for flag in ["--mesh", "--strip-prefix", "--source-timeout", "--drain", "--listen", "--log-file"] {
        let lines = options.lines().filter(|line| line.trim_start().split(['<', '[', '=', ' ']).next() == Some(flag));
        assert_eq!(lines.count(), 1, "{flag}: {options}");
    }
    assert!(text(&["plan", "-h"]).contains("ckfs help options"));
    assert!(!text(&["status", "-h"]).contains("ckfs help options"));
}

#[test]
fn the_help_of_a_command_has_the_common_options() {
    let help = |flag| ran(program().args(["mount", flag])).ok().text();
    let (short, long) = (help("-h"), help("--help"));
    for flag in ["--mesh", "--layout", "--dtype", "--config", "--mkdir"] {
        assert!(short.contains(flag) && long.contains(flag), "{flag}: {short}");
    }
    let all = ran(program().args(["help", "options"])).ok().text();
    for flag in ["--strip-prefix", "--source-timeout", "--drain", "--renumber"] {
        assert!(!short.contains(flag) && !long.contains(&format!("{flag} <")) && all.contains(flag), "{flag}: {short}");
    }
    assert!(long.trim_end().ends_with("Other options: ckfs help options"), "{long}");
    assert!(short.lines().count() < 60 && long.lines().count() < 220 && short.contains("'--help'"), "{short}");
}

#[test]
fn times_have_units_and_a_maximum_everywhere() {
    let fixture = Fixture::new();
    let long = "9223372036854775808";
    let expected = |least: &str| format!("expected a time from {least} to 8760h, found \"{long}\"");
    for flag in ["--grace", "--drain"] {
        fixture.run(&["mount", "model", "mnt", flag, long]).fails(2, &expected("0"));
    }
    for flag in ["--timeout", "--source-timeout"] {
        fixture.run(&["mount", "model", "mnt", flag, long]).fails(2, &expected("1ms"));
    }
    fixture.run(&["mount", "model", "mnt", "-o", &format!("drain={long}")]).fails(2, &expected("0"));
    fixture.run(&["umount", "mnt", "--wait", long]).fails(2, &expected("0"));
    fixture.run(&["umount", "mnt", "--wait", "2min"]).fails(1, "mnt: ");
    fixture.run(&["cache", "prune", "--older-than", "99999999999"]).fails(2, "expected a time from 0 to 876000h");
}

#[test]
fn a_mountpoint_is_made_on_request_and_removed_if_the_mount_fails() {
    if !can_mount() {
        return;
    }
    let fixture = Fixture::new();
    // The daemon's own descriptors would be covered.
    for proc in ["/dev/fd/", "/proc/self/fd", "/proc/self/task", "/proc"] {
        fixture.run(&["mount", "model", proc]).fails(1, "is in /proc, which shows processes");
    }
    // The plan refuses what a mount refuses.
    fixture.write("c.toml", "source = 'model'\nmountpoint = '/proc/self/fd'\n");
    fixture.run(&["plan", "--config", "c.toml"]).fails(1, "is in /proc");
    for command in [&["plan", "model"][..], &["mount", "model", "new/mnt", "--mkdir"]] {
        let args = [command, &["--materialize", "nosuchdir"]].concat();
        fixture.run(&args).fails(1, "nosuchdir: no place for materialized files");
    }
    fixture.run(&["mount", "model", "new/mnt"]).fails(1, "no such directory; create it first, or give --mkdir");
    fixture.run(&["mount", "model", "new/mnt", "--mkdir", "--mesh", "fsdp=0x"]).fails(2, "mesh");
    for more in [&["--even"][..], &["--even", "--foreground"]] {
        let args = [&["mount", "model", "new/mnt", "--mkdir", "--mesh", "fsdp=4"][..], more].concat();
        fixture.run(&args).fails(1, "does not split evenly");
        assert!(!fixture.path("new").exists(), "{more:?}");
    }
    fs::create_dir(fixture.path("mnt")).unwrap();
    let mounted = Mounted(&fixture);
    let ran = fixture.run(&["mount", "model", "mnt/", "--mkdir", "--mesh", "fsdp=2"]).ok();
    let line = ran.err.lines().find(|line| line.starts_with("ckfs: mounted on ")).unwrap();
    assert!(line.ends_with("; 2 devices, 96 B each") || line.ends_with("; 2 devices, 96 bytes each"), "{line}");

    fixture.run(&["unmount", "mnt"]).ok();
    assert!(fixture.path("mnt").is_dir(), "unmounting leaves the directory");
    drop(mounted);
}

#[test]
fn shards_of_a_mount_are_no_source_and_a_mistyped_mountpoint_is_proposed() {
    if !can_mount() {
        return;
    }
    let fixture = Fixture::new();
    fs::create_dir(fixture.path("mnt")).unwrap();
    let mounted = Mounted(&fixture);
    let instead = format!("mnt/hf, or the source of that mount, {}", fixture.path("model").display());
    let refuse = |source: &str, message: &str| {
        let ran = fixture.run(&["plan", source]).fails(1, message);
        assert!(ran.err.contains(&instead), "{source}: {}", ran.err);
    };
    fixture.run(&["mount", "model", "mnt", "--mesh", "fsdp=2"]).ok();
    for (source, message) in [
        ("mnt", "the root of the ckfs mount"),
        ("mnt/full", "a part of the ckfs mount"),
        ("mnt/safetensors/dev0.safetensors", "holds the shards of the devices of the ckfs mount"),
        ("mnt/safetensors/dev1.safetensors", "holds the shards of the devices of the ckfs mount"),
        ("mnt/pt/dev0.pt", "holds the shards of the devices of the ckfs mount"),
        ("mnt/pt", "holds the shards of the devices of the ckfs mount"),
    ] {
        refuse(source, message);
    }
    // The files together say where each part belongs.
    for whole in ["mnt/safetensors", "mnt/dcp", "mnt/hf", "mnt/hf/model.safetensors"] {
        fixture.run(&["plan", whole]).ok();
    }
    // Only what is above or below: another mount may be somebody else's.
    fixture.run(&["status", "mnt/hf"]).fails(1, "no ckfs mount; did you mean `");
    fixture.run(&["umount", "."]).fails(1, "mnt`?");
    for command in ["status", "umount"] {
        fs::create_dir_all(fixture.path("mmt")).unwrap();
        let said = fixture.run(&[command, "mmt"]).fails(1, "mmt").err;
        assert!(!said.contains("did you mean"), "{said}");
    }
    // The daemon holds the source's files until it has ended.
    for _ in 0..4 {
        let stats = fs::read(fixture.path("mnt/.ckfs/stats.json")).unwrap();
        let pid = serde_json::from_slice::<serde_json::Value>(&stats).unwrap()["pid"].as_u64().unwrap();
        fixture.run(&["umount", "mnt"]).ok();
        let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        assert!(state.is_empty() || state.contains(") Z "), "{state}");
        fixture.run(&["mount", "model", "mnt", "--mesh", "fsdp=2"]).ok();
    }
    fixture.run(&["umount", "mnt"]).ok();

    // Some devices only: nothing tells which parts there are.
    fixture.run(&["mount", "model", "mnt", "--mesh", "fsdp=2", "--devices", "0"]).ok();
    refuse("mnt/safetensors", "holds the shards of the devices of the ckfs mount");
    fixture.run(&["umount", "mnt"]).ok();
    // Every device has all.
    fixture.run(&["mount", "model", "mnt"]).ok();
    for whole in ["mnt/safetensors", "mnt/safetensors/dev0.safetensors", "mnt/pt", "mnt/pt/dev0.pt"] {
        fixture.run(&["plan", whole]).ok();
    }
    fixture.run(&["umount", "mnt"]).ok();
    fixture.run(&["mount", "model", "mnt", "--mesh", "dp=2"]).ok();
    for whole in ["mnt/safetensors", "mnt/safetensors/dev1.safetensors", "mnt/pt/dev1.pt"] {
        fixture.run(&["plan", whole]).ok();
    }
    fixture.run(&["umount", "mnt"]).ok();
    drop(mounted);

    fixture.run(&["export", "model", "out", "--mesh", "fsdp=2", "--only", "safetensors"]).ok();
    fixture.run(&["plan", "out/safetensors"]).ok();
    let of_several = "one of several files that hold parts of the same tensors (DCP_SHARDING_INFO); give the directory";
    fixture.run(&["plan", "out/safetensors/dev0.safetensors"]).fails(1, of_several);
    fixture.run(&["export", "model", "all", "--mesh", "fsdp=2"]).ok();
    fixture.run(&["plan", "all/safetensors/dev0.safetensors"]).fails(1, of_several);
}

#[test]
fn failures_of_the_environment_name_the_remedy() {
    let fixture = Fixture::new();
    let no_home = ran(program().args(["plan", "org/name"]).env_remove("HOME").current_dir(fixture.path("")));
    no_home.fails(1, "set HF_HOME or HOME to where the hub cache is");
    let absent = ran(program().args(["plan", "org/name"]).env("HF_HUB_CACHE", fixture.path("")));
    absent.fails(1, "`ckfs fetch org/name` brings it");
    // Nobody listens there.
    let mut unreachable = program();
    unreachable.args(["plan", "org/name"]).env("HF_HUB_CACHE", fixture.path("")).env_remove("HF_HUB_OFFLINE");
    let unreachable = ran(unreachable.env("HF_ENDPOINT", "http://127.0.0.1:9").current_dir(fixture.path("")));
    let unreachable = unreachable.fails(1, "org/name: not found\n  directory org/name: no\n  cache ");
    let remedy = "\n`ckfs fetch org/name` brings it where the Hub can be reached";
    assert!(
        unreachable.err.contains("  Hub: cannot be asked: ") && unreachable.err.contains(remedy),
        "{}",
        unreachable.err
    );
    // A bare system has no certificates.
    fixture.write("none.pem", "");
    for source in ["s3://models/demo", "https://example.com/demo/", "hf://org/name"] {
        let mut bare = program();
        bare.args(["plan", source]).env_remove("HF_HUB_OFFLINE").env("SSL_CERT_DIR", fixture.path("model"));
        bare.env("AWS_ACCESS_KEY_ID", "a").env("AWS_SECRET_ACCESS_KEY", "b").env("AWS_REGION", "us-east-1");
        let found = ran(bare.env("SSL_CERT_FILE", fixture.path("none.pem")).current_dir(fixture.path("")));
        found.fails(1, "; install the package ca-certificates");
    }
    fs::create_dir(fixture.path("gguf")).unwrap();
    fixture.write("gguf/model.gguf", "GGUF");
    fixture
        .run(&["plan", "gguf"])
        .fails(1, "a GGUF file of llama.cpp: byte 4 of the header: expected 4 bytes, found 0");
}
