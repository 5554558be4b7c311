//! The program as users run it: exit codes, messages, and standard output.
//!
//! Every command runs on a checkpoint small enough to be written per test. Tests that mount need `/dev/fuse`; without
//! it they are skipped, except in continuous integration (`CI=true`), where they fail.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests too")]

use std::{
    ffi::OsStr,
    fs,
    io::Write,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::{Value, json};
use tempfile::TempDir;

mod messages;

/// A working directory with a checkpoint in `model/`.
struct Fixture {
    directory: TempDir,
}

/// Result of a command.
struct Ran {
    code: i32,
    out: Vec<u8>,
    err: String,
}

impl Ran {
    fn text(&self) -> String {
        String::from_utf8(self.out.clone()).unwrap()
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.out).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    #[track_caller]
    fn ok(self) -> Self {
        assert_eq!(self.code, 0, "{}", self.err);
        self
    }

    /// Asserts a failure with this message, which has the common prefix, and an empty standard output.
    #[track_caller]
    fn fails(self, code: i32, message: &str) -> Self {
        assert_eq!(self.code, code, "{}\n{}", self.err, self.text());
        assert!(self.err.lines().any(|line| line.starts_with("ckfs: error: ")), "{}", self.err);
        assert!(self.err.contains(message), "expected {message:?}, found: {}", self.err);
        assert_eq!(self.out, b"", "standard output is for data");
        self
    }
}

fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ckfs"));
    command.env_remove("CKFS_LOG").env("HF_HUB_OFFLINE", "1").env_remove("HF_HUB_CACHE").env_remove("HF_HOME");
    command
}

fn ran(command: &mut Command) -> Ran {
    let Output { status, stdout, stderr } = command.output().unwrap();
    Ran { code: status.code().unwrap_or(-1), out: stdout, err: String::from_utf8(stderr).unwrap() }
}

const ROWS: usize = 6;
const COLUMNS: usize = 4;

/// Bytes of element `n` of a tensor: every element of every tensor differs.
fn element(tensor: usize, n: usize) -> [u8; 2] {
    // Finite values of bf16.
    u16::try_from(0x3c00 + tensor * 64 + n).unwrap().to_le_bytes()
}

fn write_model(directory: &Path) {
    fs::create_dir_all(directory).unwrap();
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    let names = [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "lm_head.weight",
    ];
    for (tensor, name) in names.iter().enumerate() {
        let start = data.len();
        data.extend((0..ROWS * COLUMNS).flat_map(|n| element(tensor, n)));
        let row = json!({"dtype": "BF16", "shape": [ROWS, COLUMNS], "data_offsets": [start, data.len()]});
        header.insert((*name).to_owned(), row);
    }
    let header = Value::from(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend(data);
    fs::write(directory.join("model.safetensors"), file).unwrap();
    // An unknown type with Llama's names, for which the rules expect no more tensors.
    let config = json!({"model_type": "stablelm", "num_hidden_layers": 2, "tie_word_embeddings": false});
    fs::write(directory.join("config.json"), config.to_string()).unwrap();
}

/// The stacked query projections, rows `low..high` of each layer.
fn stacked(low: usize, high: usize) -> Vec<u8> {
    let layer = |tensor| (low * COLUMNS..high * COLUMNS).flat_map(move |n| element(tensor, n));
    [1, 2].into_iter().flat_map(layer).collect()
}

impl Fixture {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        write_model(&directory.path().join("model"));
        Self { directory }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    /// Runs the program in the directory.
    fn run(&self, args: &[&str]) -> Ran {
        ran(program().args(args).current_dir(self.directory.path()))
    }
}

/// Whether the test can try to mount.
fn can_mount() -> bool {
    let can = fs::File::options().read(true).write(true).open("/dev/fuse").is_ok();
    assert!(can || std::env::var("CI").as_deref() != Ok("true"), "/dev/fuse is needed");
    can
}

#[test]
fn every_command_explains_itself_with_examples() {
    let commands = [
        "mount",
        "run",
        "umount",
        "status",
        "restart",
        #[cfg(feature = "csi")]
        "csi",
        "metrics",
        "plan",
        "explain",
        "cat",
        "export",
        "verify",
        "sums",
        "doctor",
        "demo",
        "completions",
        "man",
    ];
    for command in commands {
        let help = ran(program().args([command, "--help"])).ok().text();
        assert!(help.contains("Examples:\n") && help.contains(&format!("ckfs {command}")), "{help}");
        assert!(help.lines().all(|line| line.chars().count() <= 100), "{help}");
    }
    let help = ran(program().arg("--help")).ok().text();
    for text in commands.iter().chain(&["CKFS_LOG", "Exit codes:", "Examples:"]) {
        assert!(help.contains(text), "{text}: {help}");
    }
    let version = ran(program().arg("-V")).ok().text();
    assert_eq!(version, format!("ckfs {}\n", env!("CARGO_PKG_VERSION")));
    let long = ran(program().arg("--version")).ok().text();
    assert!(long.starts_with(&version) && long.contains("\ncommit ") && long.contains("\nfeatures "), "{long}");
}

#[test]
fn wrong_use_exits_with_2() {
    let fixture = Fixture::new();
    let rows: &[(&[&str], &str)] = &[
        (&["plan"], "expected SOURCE, or a --config file that names it"),
        (&["mount"], "expected SOURCE and MNT"),
        (&["mount", "model"], "expected MNT after SOURCE"),
        (&["umount"], "expected MNT"),
        (&["cat", "model"], "expected SOURCE and PATH, found \"model\" only"),
        (&["nonsense"], "there is no command \"nonsense\"; there are: mount, run, "),
        (&["plan", "model", "--nonsense"], "unexpected argument '--nonsense'"),
        (&["plan", "model", "--mesh", "fsdp"], "mesh: expected name=size, found \"fsdp\""),
        (&["plan", "model", "--mesh", "fsdp=0"], "expected a size of at least 1"),
        (&["plan", "model", "--dtype", "i8"], "dtype: expected keep or a float type such as bf16, found \"i8\""),
        (&["plan", "model", "--layout", "x"], "layout \"x\": expected canonical, gguf, hf, "),
        (&["plan", "model", "--shard", "x"], "shard: expected auto, none, maxtext or a file *.toml, found \"x\""),
        (&["plan", "model", "--devices", "3-1"], "devices: expected numbers and ranges"),
        (&["plan", "model", "--cache-bytes", "1X"], "expected a number of bytes"),
        (&["mount", "model", "mnt", "-o", "nonsense"], "unknown option \"nonsense\""),
        (&["mount", "model", "mnt", "-o", "mesh=x"], "-o: invalid value 'x' for '--mesh"),
        (&["verify", "model", "--full", "--sample", "1K"], "cannot be used with"),
    ];
    for (args, message) in rows {
        fixture.run(args).fails(2, message);
    }
    // Without a command, the program suggests help.
    assert_eq!(fixture.run(&[]).code, 2);
    let bad_log = ran(program().args(["plan", "model"]).env("CKFS_LOG", "=nonsense=").current_dir(fixture.path("")));
    bad_log.fails(2, "CKFS_LOG==nonsense=");
}

#[test]
fn failures_exit_with_1_and_state_the_expected_value() {
    let fixture = Fixture::new();
    fs::create_dir(fixture.path("full")).unwrap();
    fixture.write("full/file", "");
    std::os::unix::fs::symlink("model", fixture.path("link")).unwrap();
    let rows: &[(&[&str], &str)] = &[
        (&["plan", "absent"], "absent"),
        (&["plan", "ftp://bucket/x"], "ftp:// is not known"),
        (&["plan", "full"], "no *.safetensors here"),
        (&["plan", "model", "--mesh", "fsdp=4", "--even"], "does not split evenly in 4 parts"),
        (&["plan", "model", "--mesh", "fsdp=4", "--devices", "7"], "--devices 7: mesh fsdp=4 has 4 devices, 0 to 3"),
        (&["plan", "model", "--config", "absent.toml"], "absent.toml: no such file"),
        (&["plan", "model", "--layout", "/absent.toml"], "error: /absent.toml: no such file"),
        (&["cat", "model", "dev0/layers/scanned/wx"], "dev0/layers/scanned has no \"wx\"; it has: wq"),
        (&["cat", "model", "dev0"], "dev0: is a directory; it has: embed, layers, lm_head"),
        (&["cat", "model", "dev0/embed", "--offset", "49"], "the file has 48 bytes"),
        (&["cat", "model", "dev0/embed", "--length", "49"], "bytes 0..49 are beyond the end: the file has 48 bytes"),
        (&["export", "model", "full"], "full: not empty; --force"),
        (&["export", "model", "new", "--only", "nonsense"], "no file matches nonsense"),
        (&["export", "model", "model"], "lies inside the source"),
        (&["export", "model", "model/sub"], "lies inside the source"),
        (&["export", "model", "full/../model/sub"], "lies inside the source"),
        (&["export", "model", "link/sub/deep"], "lies inside the source"),
        (&["mount", "model", "absent"], "no such directory; create it first"),
        (&["mount", "model", "model/config.json"], "not a directory"),
        (&["umount", "model"], "not mounted"),
        (&["status", "model"], "no ckfs mount"),
        (&["restart", "model"], "model: no ckfs mount"),
        (&["verify", "model", "--only", "nonsense"], "no file matches nonsense"),
    ];
    for (args, message) in rows {
        println!("{args:?}");
        let ran = fixture.run(args).fails(1, message);
        assert!(!ran.err.contains("For more information"), "{}", ran.err);
    }
    assert!(!fixture.path("new").exists(), "nothing is made for a refused export");
    fixture.run(&["export", "model", "model/../beside", "--only", "hf/config.json"]).ok();
    assert!(fixture.path("beside/hf/config.json").exists());
}

#[test]
fn all_problems_are_reported_at_once() {
    let fixture = Fixture::new();
    let ran = fixture.run(&["plan", "model", "--mesh", "fsdp=4", "--even", "--layout", "hf"]).fails(1, "4 problems:\n");
    let lines: Vec<&str> = ran.err.lines().skip(1).map(str::trim).collect();
    assert_eq!(lines.len(), 3, "a line for each way to fail: {}", ran.err);
    assert!(lines[1].starts_with("model.layers.{0-1}.self_attn.q_proj.weight (2 tensors): axis 0 "), "{}", ran.err);
}

#[test]
fn plan_states_dialect_devices_and_tensors() {
    let fixture = Fixture::new();
    let text = fixture.run(&["plan", "-v", "model", "--mesh", "fsdp=2,tensor=3"]).ok().text();
    for part in
        ["stablelm, 4 tensors", "fsdp=2,tensor=3: 6 devices", "layers.scanned.wq", "[2, 6, 4]", "[-,[tensor,fsdp],-]"]
    {
        let found = text.contains(part) || text.contains(&part.replace(", ", ","));
        assert!(found, "{part}: {text}");
    }
    let json = fixture.run(&["plan", "model", "--mesh", "fsdp=2", "--dtype", "f32", "--json"]).ok().json();
    let view = &json["views"][0];
    assert_eq!(json["dialect"]["model_type"], "stablelm");
    assert_eq!((&view["dtype"], &view["mesh"]["devices"]), (&json!("F32"), &json!(2)));
    assert_eq!(view["bytes"], json!(4 * ROWS * COLUMNS * 4));
    let bytes: Vec<u64> =
        view["devices"].as_array().unwrap().iter().map(|row| row["bytes"].as_u64().unwrap()).collect();
    assert_eq!(bytes, [192, 192]);
    let wq = view["tensors"].as_array().unwrap().iter().find(|row| row["name"] == "layers.scanned.wq").unwrap();
    assert_eq!(wq["shape"], json!([2, ROWS, COLUMNS]));
    assert_eq!(wq["spec"], json!([null, "fsdp", null]));
    assert_eq!(wq["layers"], json!([0, 1]));
}

/// Two layers of a down projection with rows of 16 KiB, all zeros; the first begins with a page of the file.
fn write_down_projections(directory: &Path) {
    fs::create_dir_all(directory).unwrap();
    let bytes = 64 * 8192 * 2;
    let row = |layer: u64| json!({"dtype": "BF16", "shape": [64, 8192], "data_offsets": [layer * bytes, (layer + 1) * bytes]});
    let header = json!({"model.layers.0.mlp.down_proj.weight": row(0), "model.layers.1.mlp.down_proj.weight": row(1)});
    let header = format!("{:<width$}", header.to_string(), width = 4096 - 8);
    let file = fs::File::create(directory.join("model.safetensors")).unwrap();
    (&file).write_all(&[&(4096u64 - 8).to_le_bytes(), header.as_bytes()].concat()).unwrap();
    file.set_len(4096 + 2 * bytes).unwrap();
    let config = json!({"model_type": "stablelm", "num_hidden_layers": 2, "tie_word_embeddings": false});
    fs::write(directory.join("config.json"), config.to_string()).unwrap();
}

#[test]
fn plan_and_explain_report_the_over_read() {
    let fixture = Fixture::new();
    write_down_projections(&fixture.path("down"));
    // A device has 2 KiB of each row, half a page; two neighbours together have whole pages.
    let plan =
        |devices: &str| fixture.run(&["plan", "-v", "down", "--mesh", "tensor=8", "--devices", devices]).ok().text();
    let half = "256 KiB of the sources, 512 KiB in whole pages: 2.00 times";
    let all = plan("0-7");
    for line in [
        format!("over-read   dev0-7: each {half}\n"),
        "all listed devices together: 2.0 MiB of the sources, 2.0 MiB in whole pages: 1.00 times\n".to_owned(),
        "most by layers.scanned.w_down 2.00 times\n".to_owned(),
        "devices     dev0 = tensor=0  dev1 = tensor=1  dev2 = tensor=2  dev3 = tensor=3\n".to_owned(),
        "why: of layers.scanned.w_down, tensor=8 cuts axis 2: a device needs 2.0 KiB of every 16.0 KiB, and files are read in \
         pages of 4.0 KiB\n"
            .to_owned(),
        "advice: a host that runs all listed devices reads each page once, and no more than it needs\n".to_owned(),
    ] {
        assert!(all.contains(&line), "{line}: {all}");
    }
    let apart = plan("1-2,5");
    let union = "all listed devices together: 768 KiB of the sources, 1.5 MiB in whole pages: 2.00 times\n";
    assert!(apart.contains(&format!("dev1-2,5: each {half}\n")) && apart.contains(union), "{apart}");
    assert!(apart.contains("advice: devices that differ only in tensor use the same pages"), "{apart}");
    let rows = fixture.run(&["plan", "-v", "down", "--mesh", "fsdp=8"]).ok().text();
    assert!(!rows.contains("over-read"), "{rows}");
    let json = fixture.run(&["plan", "down", "--mesh", "tensor=8", "--devices", "0-1", "--json"]).ok().json();
    let reads = |paged: u64| json!({"needed_bytes": 256 << 10, "paged_bytes": paged});
    let device = |device: u64| {
        let mut row = reads(512 << 10);
        row["device"] = device.into();
        row
    };
    let amplification = &json["views"][0]["amplification"];
    assert_eq!(amplification["page_bytes"], 4096);
    assert_eq!(amplification["devices"], json!([device(0), device(1)]));
    assert_eq!(amplification["union"], json!({"needed_bytes": 512 << 10, "paged_bytes": 512 << 10}));
    assert_eq!(amplification["tensors"][0]["name"], "layers.scanned.w_down");
    let path = "dev1/layers/scanned/w_down";
    let text = fixture.run(&["explain", "down", path, "--mesh", "tensor=8"]).ok().text();
    assert!(text.contains(&format!("reads         {half}\n")), "{text}");
    let json = fixture.run(&["explain", "down", path, "--mesh", "tensor=8", "--json"]).ok().json();
    assert_eq!(json["reads"], json!({"needed_bytes": 256 << 10, "paged_bytes": 512 << 10, "page_bytes": 4096}));
}

#[test]
fn a_page_of_the_plan_is_one_file_beside_what_is_printed() {
    let fixture = Fixture::new();
    let printed = fixture.run(&["plan", "model", "--mesh", "fsdp=2"]).ok().text();
    assert_eq!(fixture.run(&["plan", "model", "--mesh", "fsdp=2", "--html", "plan.html"]).ok().text(), printed);
    let page = fs::read_to_string(fixture.path("plan.html")).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.contains("script-src 'sha256-"), "{page}");
    assert!(page.matches("<script").count() == 2 && page.contains("model.layers.0.self_attn.q_proj.weight"), "{page}");
    fixture.run(&["plan", "model", "--html", "-"]).fails(2, "-: expected the name of a file, such as plan.html");
    fixture.run(&["plan", "model", "--html", "/dev/null"]).fails(2, "/dev/null: is not a regular file");
    // A name that is no text.
    let mut plan = Command::new(env!("CARGO_BIN_EXE_ckfs"));
    let name = OsStr::from_bytes(b"a\xff.html");
    let done = plan.args(["plan", "model", "--html"]).arg(name).current_dir(fixture.path("")).output().unwrap();
    assert!(done.status.success() && fixture.path("").join(name).is_file(), "{done:?}");
    assert!(!String::from_utf8_lossy(&done.stdout).contains("\nnext "), "{done:?}");
}

#[test]
fn a_plan_says_in_a_dozen_lines_what_matters() {
    let fixture = Fixture::new();
    let flags = ["plan", "model", "--mesh", "fsdp=2,tensor=3", "--no-mtp", "--renumber"];
    let ran = fixture.run(&flags).ok();
    let text = ran.text();
    let keys: Vec<&str> = text.lines().filter_map(|line| line.split_whitespace().next()).collect();
    for key in ["source", "dialect", "layout", "mesh", "tensors", "per", "more", "next"] {
        assert!(keys.contains(&key), "{key}: {text}");
    }
    assert!(text.lines().count() <= 13 && !text.contains("layers.scanned.wq"), "{text}");
    assert!(text.contains("ckfs mount model MNT --mesh fsdp=2,tensor=3 --no-mtp --renumber\n"), "{text}");
    // Each warning is said once: after a short plan, and in the text of a whole one.
    let idle = ["--no-mtp changes nothing", "--renumber changes nothing"];
    let said = ran.err.lines().filter(|line| line.starts_with("ckfs: warning: ")).count();
    assert!(idle.iter().all(|text| ran.err.matches(text).count() == 1) && said == 2, "{}", ran.err);
    let all = fixture.run(&[&["-v"], &flags[..]].concat()).ok();
    for text in idle {
        assert_eq!((all.text().matches(text).count(), all.err.matches(text).count()), (1, 0), "{}", all.err);
    }
    assert_eq!(fixture.run(&[&["-q"], &flags[..]].concat()).ok().err, "");
}

#[test]
fn a_page_compares_meshes() {
    let fixture = Fixture::new();
    let ran = fixture.run(&["plan", "model", "--mesh", "fsdp=2", "--mesh=tensor=3", "--html", "both.html"]).ok();
    let text = ran.text();
    for line in ["view        fsdp=2\n", "view        tensor=3\n", "mesh        tensor=3: 3 devices"] {
        assert!(text.contains(line), "{line}: {text}");
    }
    let page = fs::read_to_string(fixture.path("both.html")).unwrap();
    assert!(page.contains("\"name\":\"fsdp=2\"") && page.contains("\"name\":\"tensor=3\""));
    let wrong = ["plan", "model", "--mesh", "fsdp=2", "--mesh", "fsdp", "--html", "none.html"];
    fixture.run(&wrong).fails(2, "mesh: expected name=size, found \"fsdp\"");
    assert!(!fixture.path("none.html").exists());
}

#[test]
fn flags_that_change_nothing_are_named() {
    let fixture = Fixture::new();
    for (flag, why) in [
        ("--dequantize", "no tensor of this source is quantized"),
        ("--text-only", "the model has text alone"),
        ("--no-mtp", "there are no layers of multi-token prediction"),
        ("--renumber", "--layers leaves none out"),
        ("--training-state", "files of safetensors have weights alone"),
    ] {
        let ran = fixture.run(&["plan", "model", flag]).ok();
        assert!(ran.err.contains(&format!("ckfs: warning: {flag} changes nothing: {why}\n")), "{}", ran.err);
    }
    let ran = fixture.run(&["plan", "model", "--hf-cache", "share"]).ok();
    let share = "ckfs: warning: --hf-cache share changes nothing: no file of this source comes from the Hub\n";
    assert!(ran.err.contains(share), "{}", ran.err);
    let ran = fixture.run(&["plan", "model", "--renumber", "--layers", "0..1"]).ok();
    assert!(!ran.err.contains("changes nothing"), "{}", ran.err);
    let ran = fixture.run(&["plan", "model", "--part", "text"]).ok();
    assert!(!ran.err.contains("changes nothing"), "{}", ran.err);
    fixture.run(&["plan", "model", "--gguf-type", "q8_0"]).fails(1, "gguf_type: is of the file of --layout gguf alone");
}

#[test]
fn patterns_and_renames_that_match_nothing_are_named() {
    let fixture = Fixture::new();
    let quantize: &[&str] = &["--quantize", "fp8-block", "--layout", "hf"];
    for (flags, text) in [
        (["--source-rename", "zzz=>y"], "source_rename: \"zzz\" changes no name"),
        (["--rename", "zzz=>y"], "rename: \"zzz\" changes no name"),
        (["--strip-prefix", "zzz."], "rename: \"^zzz\\\\.\" changes no name"),
        (["--quantize-ignore", "*zzz*"], "quantize_ignore: the pattern \"*zzz*\" matches no tensor"),
    ] {
        let more = if flags[0] == "--quantize-ignore" { quantize } else { &[] };
        let ran = fixture.run(&[&["plan", "model"], more, &flags].concat()).ok();
        assert!(ran.err.contains(&format!("ckfs: warning: {text}")), "{}", ran.err);
    }
    // Each of these is of the names that the one before it leaves, or of modules.
    let renames = ["--rename", "^model=>zzz", "--rename", "zzz=>y", "--quantize-ignore", "*.layers.0.*.q_proj"];
    let ran = fixture.run(&[&["plan", "model"], quantize, &renames].concat()).ok();
    assert!(!ran.err.contains("changes no name") && !ran.err.contains("matches no tensor"), "{}", ran.err);
}

#[test]
fn cat_gives_the_bytes_of_the_shard() {
    let fixture = Fixture::new();
    let cat =
        |path: &str, more: &[&str]| fixture.run(&[&["cat", "model", path, "--mesh", "fsdp=2"], more].concat()).ok().out;
    assert_eq!(cat("dev1/layers/scanned/wq", &[]), stacked(3, 6));
    assert_eq!(cat("mesh/fsdp=1/layers/scanned/wq", &[]), stacked(3, 6));
    assert_eq!(cat("/full/layers/scanned/wq", &["--offset", "5", "--length", "50"]), stacked(0, 6)[5..55]);
    assert_eq!(cat("hf/model.safetensors", &[]), fs::read(fixture.path("model/model.safetensors")).unwrap());
    assert_eq!(cat("dev0/embed", &["--offset", "24"]), b"");
    assert_eq!(cat("dev1/layers/scanned/wq", &["--source-io", "pread"]), stacked(3, 6));
    let single = fixture.run(&["cat", "model/model.safetensors", "full/embed_tokens"]).ok().out;
    assert_eq!(single, (0..ROWS * COLUMNS).flat_map(|n| element(0, n)).collect::<Vec<_>>());
}

#[test]
fn a_closed_pipe_is_no_failure() {
    let fixture = Fixture::new();
    let script = format!("{} plan model --json | head -c 1", env!("CARGO_BIN_EXE_ckfs"));
    let ran = ran(Command::new("bash").args(["-o", "pipefail", "-c", &script]).current_dir(fixture.path("")));
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
}

#[test]
fn explain_names_tensors_files_and_spans() {
    let fixture = Fixture::new();
    let args = ["explain", "model", "dev1/layers/scanned/wq", "--mesh", "fsdp=2", "--dtype", "f32"];
    let text = fixture.run(&args).ok().text();
    for part in
        ["stack axis 0", "slice axis 1, start 3, stop 6", "model.layers.1.self_attn.q_proj.weight", "BF16 -> f32"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let json = fixture.run(&[&args[..], &["--json"]].concat()).ok().json();
    assert_eq!(json["bytes"], json!(2 * 3 * COLUMNS * 4));
    let pieces = json["segments"][0]["pieces"].as_array().unwrap();
    let file = fs::read(fixture.path("model/model.safetensors")).unwrap();
    let wanted = stacked(3, 6);
    for (piece, wanted) in pieces.iter().zip(wanted.chunks(3 * COLUMNS * 2)) {
        let span = |key: &str| usize::try_from(piece[key].as_u64().unwrap()).unwrap();
        assert_eq!(&file[span("file_start")..span("file_end")], wanted);
    }
    let original = fixture.run(&["explain", "model", "hf/config.json"]).ok().text();
    assert!(original.contains("identical to") && original.contains("model/config.json"), "{original}");
    // A file of a mount, or of an export, says by its path what the flags would say.
    fixture.run(&["export", "model", "out", "--mesh", "fsdp=2", "--dtype", "f32"]).ok();
    for path in [
        &["out/dev1/layers/scanned/wq"][..],
        &["out", "dev1/layers/scanned/wq"],
        &["out/mesh/fsdp=1/layers/scanned/wq"],
    ] {
        assert_eq!(fixture.run(&[&["explain"][..], path].concat()).ok().text(), text);
    }
    fixture.run(&["explain", "out/dev1/embed", "--mesh", "fsdp=4"]).fails(1, "out: is a mount, which says by itself");
    fixture.run(&["explain", "out/dev7/embed"]).fails(1, "2 devices, dev0 to dev1");
    fixture.run(&["explain", "out"]).fails(1, ".: is a directory; it has: ");
    fixture
        .run(&["explain", "model/config.json"])
        .fails(2, "expected SOURCE and PATH, found \"model/config.json\" only");
}

#[test]
fn config_errors_name_the_line() {
    let fixture = Fixture::new();
    fixture.write("a.toml", "source = \"model\"\n\nmehs = \"fsdp=2\"\n");
    fixture.run(&["plan", "--config", "a.toml"]).fails(2, "a.toml:3: unknown field `mehs`");
    fixture.write("b.toml", "source = \"model\"\n[view.x]\nmesh = \"fsdp\"\n");
    fixture.run(&["plan", "--config", "b.toml"]).fails(2, "b.toml:3: mesh: expected name=size");
}

#[test]
fn views_of_a_config_file_and_flags_over_it() {
    let fixture = Fixture::new();
    fs::create_dir(fixture.path("etc")).unwrap();
    fixture.write(
        "etc/c.toml",
        "source = \"../model\"\ndtype = \"f32\"\n[[cast]]\nmatch = \"embed\"\ndtype = \"keep\"\n\
         [view.train]\nmesh = \"fsdp=2\"\n[view.rollout]\nmesh = \"tensor=2\"\nlayout = \"hf\"\n\
         [[view.rollout.shard_rules]]\nmatch = \"lm_head*\"\nspec = [\"-\", \"tensor\"]\n",
    );
    let json = fixture.run(&["plan", "--config", "etc/c.toml", "--json"]).ok().json();
    let names: Vec<_> = json["views"].as_array().unwrap().iter().map(|view| view["name"].clone()).collect();
    assert_eq!(names, ["rollout", "train"]);
    assert_eq!(json["views"][0]["layout"], "hf");
    let rows = json["views"][0]["tensors"].as_array().unwrap();
    let head = rows.iter().find(|row| row["name"] == "lm_head.weight").unwrap();
    assert_eq!(head["spec"], json!([null, "tensor"]));
    let embed = fixture.run(&["cat", "--config", "etc/c.toml", "train/dev1/embed"]).ok().out;
    assert_eq!(embed, (12..24).flat_map(|n| element(0, n)).collect::<Vec<_>>(), "kept as it is");
    let wq = fixture.run(&["cat", "--config", "etc/c.toml", "train/dev1/layers/scanned/wq", "--dtype", "keep"]).ok();
    assert_eq!(wq.out, stacked(3, 6), "a flag wins over the file");
    fixture.run(&["cat", "--config", "etc/c.toml", "dev1/embed"]).fails(1, "did you mean `train/dev1/embed`?");
    fixture.run(&["cat", "--config", "etc/c.toml", "nothing"]).fails(1, "it has: .ckfs, rollout, train");
}

#[test]
fn the_effective_configuration_reads_back() {
    let fixture = Fixture::new();
    fixture.write("rules.toml", "shard = \"none\"\n[[shard_rules]]\nmatch = \"embed\"\nspec = [\"fsdp\"]\n");
    let flags = ["--mesh", "fsdp=2", "--shard", "rules.toml", "--devices", "1", "--unscanned"];
    let cat = |path: &str| fixture.run(&[&["cat", "model", path][..], &flags].concat()).ok().out;
    fixture.write("effective.toml", &String::from_utf8(cat(".ckfs/config.toml")).unwrap());
    fs::remove_file(fixture.path("rules.toml")).unwrap();
    let again =
        ran(program().args(["plan", "--json", "--config"]).arg(fixture.path("effective.toml")).current_dir("/")).ok();
    let view = &again.json()["views"][0];
    assert_eq!((&view["unscanned"], &view["devices"][0]["device"]), (&json!(true), &json!(1)));
    let specs: Vec<_> = view["tensors"].as_array().unwrap().iter().map(|row| (&row["name"], &row["spec"][0])).collect();
    assert!(specs.iter().all(|(name, spec)| (**name == "embed") == (**spec == "fsdp")), "{specs:?}");
}

#[test]
fn a_mounts_configuration_makes_the_same_plan() {
    let fixture = Fixture::new();
    fixture.write(
        "my.toml",
        "name = 'x'\n[params]\nrows = '6'\n[[leaf]]\nto = 'wq'\nfrom = 'model.layers.{l}.self_attn.q_proj.weight'\n\
         view = 'cut_or_pad(x, 0, rows)'\nstack = [{ var = 'l', name = 'layers' }]\naxes = 'rows cols'\n",
    );
    fixture.write("rules.toml", "[[shard_rules]]\nmatch = 'x.w*'\nspec = ['-', 'fsdp']\n");
    fixture.write(
        "views.toml",
        "[[cast]]\nmatch = '*q_proj*'\ndtype = 'keep'\n[[logical_rules]]\nlogical = 'rows'\nmesh = ['fsdp']\n\
         [view.a]\n[view.b]\nshard = 'none'\n",
    );
    let views: [&[&str]; 4] = [
        &[
            "--mesh",
            "fsdp=2,tensor=2",
            "--devices",
            "1-2",
            "--dtype",
            "f32",
            "--unscanned",
            "--tied",
            "absent",
            "--strip-prefix",
            "layers.",
            "--rename",
            r"^(\d)\.=>l$1.",
            "--add-prefix",
            "x.",
            "--chunk-bytes",
            "4K",
            "--shard",
            "rules.toml",
            "--exclude",
            "/lm_head/",
            "--allow-missing=*norm*",
            "--allow-unmapped",
        ],
        &["--layout", "hf", "--layers", "1", "--renumber", "--no-mtp", "--text-only", "--include", "*weight", "--even"],
        &[
            "--layout",
            "my.toml",
            "--set",
            "rows=4",
            "--shard",
            "maxtext",
            "--mesh",
            "fsdp=2",
            "--allow-unmapped=*e*",
            "--source-rename",
            "nothing=>x",
            "--cache-bytes",
            "64M",
            "--source-io",
            "pread",
            "--threads",
            "2",
        ],
        &["--config", "views.toml", "--layout", "my.toml", "--mesh", "fsdp=3", "--allow-unmapped"],
    ];
    for flags in views {
        let run = |args: &[&str]| fixture.run(&[args, flags].concat()).ok();
        let expected = run(&["plan", "model", "--json"]).json();
        let path = ".ckfs/config.toml";
        fixture.write("effective.toml", &run(&["cat", "model", path]).text());
        let again =
            ran(program().args(["plan", "--json", "--config"]).arg(fixture.path("effective.toml")).current_dir("/"))
                .ok();
        assert_eq!(again.json()["views"], expected["views"], "{flags:?}");
        let written = fixture.run(&["cat", "--config", "effective.toml", path]).ok().text();
        assert_eq!(written, fs::read_to_string(fixture.path("effective.toml")).unwrap(), "{flags:?}");
    }
}

#[test]
fn unexpected_names_come_with_advice() {
    let fixture = Fixture::new();
    let config = fs::read_to_string(fixture.path("model/config.json")).unwrap();
    fixture.write("model/config.json", &config.replace("stablelm", "llama"));
    let refused = fixture
        .run(&["plan", "model"])
        .fails(1, "missing tensor model.layers.{0-1}.self_attn.k_proj.weight (2 tensors)");
    let advice = "--allow-missing[=PATTERN] accepts what is missing, --allow-unmapped[=PATTERN] what is unexpected";
    assert_eq!(refused.err.matches(advice).count(), 1, "{}", refused.err);
    let plan = fixture.run(&["plan", "model", "--allow-missing", "--json"]).ok().json();
    let missing = plan["views"][0]["missing"].as_array().unwrap();
    assert!(missing.contains(&json!({"name": "model.norm.weight", "count": 1, "nearest": null})), "{missing:?}");
    let other = fixture.run(&["plan", "model", "--allow-missing", "--even", "--mesh", "fsdp=4"]).fails(1, "4 parts");
    assert!(!other.err.contains(advice), "{}", other.err);
}

#[test]
fn plan_lists_the_directories_that_a_mount_would_not_have() {
    let fixture = Fixture::new();
    let flags = ["plan", "model", "--mesh", "fsdp=4", "--layers", "1"];
    let text = fixture.run(&[&["-v"], &flags[..]].concat()).ok().text();
    let line = "not there   hf/: config.json cannot say which layers there are";
    assert!(text.lines().any(|found| found.starts_with(line)), "{text}");
    let text = fixture.run(&[&flags[..4], &["--devices", "0-1", "-v"]].concat()).ok().text();
    let line = "partial     safetensors/: only 2 of 4 devices are listed, and they do not hold every tensor whole";
    assert!(text.lines().any(|found| found.starts_with(line)), "{text}");
    let json = fixture.run(&[&flags[..4], &["--devices", "0-1", "--json"]].concat()).ok().json();
    let found = json["views"][0]["unavailable"].as_array().unwrap();
    assert_eq!((found.len(), &found[0]["format"]), (1, &json!("safetensors")));
    // The mount shows the same reason.
    let cat = |path: &str| fixture.run(&["cat", "model", path, "--mesh", "fsdp=4", "--devices", "0-1"]).ok().text();
    assert!(cat(".ckfs/plan.txt").contains(line));
    // The listed replicas hold all of every tensor.
    let whole = fixture.run(&["plan", "model", "--mesh", "data=2,fsdp=2", "--devices", "0-1", "--json"]).ok().json();
    assert_eq!(whole["views"][0]["unavailable"], json!([]));
}

#[test]
fn repositories_of_the_hub_cache_are_pinned_to_their_commit() {
    let fixture = Fixture::new();
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let repo = fixture.path("hub/models--org--name");
    write_model(&repo.join("snapshots").join(commit));
    fs::create_dir(repo.join("refs")).unwrap();
    fs::write(repo.join("refs/main"), commit).unwrap();
    let args = ["cat", "org/name", ".ckfs/config.toml"];
    let ran = ran(program().args(args).env("HF_HUB_CACHE", fixture.path("hub")).current_dir(fixture.path(""))).ok();
    assert!(ran.text().contains(&format!("source = \"org/name@{commit}\"")), "{}", ran.text());
}

#[test]
fn export_writes_the_bytes_of_cat() {
    let fixture = Fixture::new();
    let only = ["--mesh", "fsdp=2", "--only", "dev1", "--only", "mesh", "--only", "safetensors/*"];
    let ran = fixture.run(&[&["export", "model", "out"][..], &only].concat()).ok();
    assert!(
        ran.text().is_empty() && ran.err.starts_with("ckfs: 7 files, ") && ran.err.ends_with("/out\n"),
        "{}",
        ran.err
    );
    assert_eq!(fs::read(fixture.path("out/dev1/layers/scanned/wq")).unwrap(), stacked(3, 6));
    assert_eq!(fs::read_link(fixture.path("out/mesh/fsdp=1")).unwrap(), Path::new("../dev1"));
    assert!(!fixture.path("out/dev0").exists() && !fixture.path("out/hf").exists());
    let file = fixture.run(&["cat", "model", "safetensors/dev0.safetensors", "--mesh", "fsdp=2"]).ok().out;
    assert_eq!(fs::read(fixture.path("out/safetensors/dev0.safetensors")).unwrap(), file);
    // A second export, over the first.
    fixture.run(&[&["export", "model", "out", "--force", "-q"][..], &only].concat()).ok();
    let left = Command::new("find").arg(fixture.path("out")).args(["-name", "*.part"]).output().unwrap();
    assert_eq!(left.stdout, b"");
}

/// The bytes of every file below a directory, by path.
fn tree_of(root: &Path) -> std::collections::BTreeMap<PathBuf, Vec<u8>> {
    let mut pending = vec![root.to_owned()];
    let mut files = std::collections::BTreeMap::new();
    while let Some(directory) = pending.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let entry = entry.unwrap();
            match entry.file_type().unwrap() {
                kind if kind.is_dir() => pending.push(entry.path()),
                kind if kind.is_file() => {
                    let path = entry.path().strip_prefix(root).unwrap().to_owned();
                    files.insert(path, fs::read(entry.path()).unwrap());
                }
                _ => {}
            }
        }
    }
    files
}

#[test]
fn an_interrupted_export_goes_on() {
    let fixture = Fixture::new();
    let flags = ["--mesh", "fsdp=2", "--dtype", "f32"];
    let export = |target: &str, more: &[&str]| fixture.run(&[&["export", "model", target][..], &flags, more].concat());
    export("whole", &[]).ok();
    // A directory where the last file is to be: the export fails when the others are complete.
    let last = "safetensors/dev1.safetensors";
    fs::create_dir_all(fixture.path(&format!("out/{last}"))).unwrap();
    export("out", &["--force"]).fails(1, last);
    assert!(fixture.path("out/.ckfs-export").is_file());
    let (kept, edited) = (fixture.path("out/dev0/embed"), fixture.path("out/dev1/embed"));
    let before = fs::metadata(&kept).unwrap().modified().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(50));
    let mut bytes = fs::read(&edited).unwrap();
    bytes[3] ^= 1;
    fs::write(&edited, bytes).unwrap();
    fs::remove_dir(fixture.path(&format!("out/{last}"))).unwrap();
    // Another view does not go on with it.
    fixture.run(&["export", "model", "out", "--mesh", "fsdp=4"]).fails(1, "an interrupted export of another view");
    let ran = export("out", &["--json"]).ok();
    assert!(ran.json()["kept_files"].as_u64().unwrap() > 3, "{}", ran.text());
    assert!(ran.err.starts_with("ckfs: ") && ran.err.ends_with("are complete already\n"), "{}", ran.err);
    assert_eq!(fs::metadata(&kept).unwrap().modified().unwrap(), before);
    let (mut found, mut expected) = (tree_of(&fixture.path("out")), tree_of(&fixture.path("whole")));
    for tree in [&mut found, &mut expected] {
        tree.retain(|path, _| !path.starts_with(".ckfs"));
    }
    assert!(found == expected, "{:?} {:?}", found.keys(), expected.keys());
    // It is complete now, and the same command changes nothing.
    let again = export("out", &[]).ok();
    assert!(again.err.ends_with("out: complete already\n"), "{}", again.err);
    assert!(tree_of(&fixture.path("out/dev0")) == tree_of(&fixture.path("whole/dev0")));
    assert_eq!(fs::metadata(&kept).unwrap().modified().unwrap(), before);
    fixture.run(&["export", "model", "out", "--mesh", "fsdp=4"]).fails(1, "not empty");
    fs::write(&edited, "edited").unwrap();
    export("out", &[]).fails(1, "not empty");
    assert_eq!(fs::read(&edited).unwrap(), b"edited");

    // A source that changed in the meantime.
    fs::create_dir_all(fixture.path(&format!("other/{last}"))).unwrap();
    export("other", &["--force"]).fails(1, last);
    fs::remove_dir(fixture.path(&format!("other/{last}"))).unwrap();
    let source = fixture.path("model/model.safetensors");
    let (mut bytes, time) = (fs::read(&source).unwrap(), fs::metadata(&source).unwrap().modified().unwrap());
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&source, bytes).unwrap();
    // With its old time, as rsync and touch give it.
    fs::File::options().write(true).open(&source).unwrap().set_modified(time).unwrap();
    export("other", &[]).fails(1, "of a source that has changed");
    let ran = export("other", &["--force", "--json"]).ok();
    assert_eq!((&ran.json()["kept_files"], ran.err.as_str()), (&json!(0), ""));
    fixture.run(&["verify", "other", "--full"]).ok();
}

#[test]
fn the_same_export_of_a_run_adds_the_steps_that_have_come_since() {
    let fixture = Fixture::new();
    let add = |step: u64| {
        let at = fixture.path(&format!("run/checkpoint-{step}"));
        fs::create_dir_all(&at).unwrap();
        for entry in fs::read_dir(fixture.path("model")).unwrap().map(Result::unwrap) {
            fs::copy(entry.path(), at.join(entry.file_name())).unwrap();
        }
        fs::write(at.join("trainer_state.json"), "{}").unwrap();
    };
    let export = || fixture.run(&["export", "run", "out", "--steps", "all", "--layout", "hf"]);
    add(100);
    export().ok();
    let first = fixture.path("out/100/hf/model.safetensors");
    let stamp = || fs::metadata(&first).unwrap().modified().unwrap();
    let before = stamp();
    assert!(export().ok().err.ends_with("out/100: complete already\n"));
    add(200);
    let ran = export().ok();
    assert!(ran.err.contains("out/100: complete already\n") && ran.err.ends_with("out/200\n"), "{}", ran.err);
    assert_eq!(stamp(), before);
    assert_eq!(fs::read(&first).unwrap(), fs::read(fixture.path("out/latest/hf/model.safetensors")).unwrap());
    // What another has written stays.
    fs::write(&first, "edited").unwrap();
    export().fails(1, "out/100: not empty");
    assert_eq!(fs::read(&first).unwrap(), b"edited");
    let mine = fixture.path("out/300/mine");
    fs::create_dir_all(mine.parent().unwrap()).unwrap();
    fs::write(&mine, "mine").unwrap();
    fs::remove_dir_all(fixture.path("out/100")).unwrap();
    add(300);
    export().fails(1, "out/300: not empty");
    assert_eq!(fs::read(&mine).unwrap(), b"mine");
}

#[test]
fn verify_compares_with_the_evaluator() {
    let fixture = Fixture::new();
    for flags in [&["--full"][..], &["--sample", "64"], &["--dtype", "f16", "--mesh", "fsdp=4"], &["--layout", "hf"]] {
        let text = fixture.run(&[&["verify", "model"][..], flags].concat()).ok().text();
        assert!(text.ends_with("compared, no difference\n"), "{text}");
        // How much of how much.
        let is_sample = flags[0] == "--sample";
        assert_eq!((text.contains(", all "), text.contains(" of ")), (!is_sample, is_sample), "{text}");
    }
}

#[test]
fn verify_finds_a_single_wrong_byte() {
    let fixture = Fixture::new();
    // An export is verified like a mount: by its own configuration.
    fixture.run(&["export", "model", "out", "--mesh", "fsdp=2", "--dtype", "f32"]).ok();
    fixture.run(&["verify", "out"]).ok();
    let wrong = fixture.path("out/dev1/layers/scanned/wq");
    let mut bytes = fs::read(&wrong).unwrap();
    bytes[17] ^= 0x40;
    fs::write(&wrong, &bytes).unwrap();
    let ran = fixture.run(&["verify", "out"]).fails(1, "1 difference in ");
    assert!(ran.err.contains("\n  dev1/layers/scanned/wq: byte 17: expected 0x"), "{}", ran.err);
    bytes.pop();
    fs::write(&wrong, &bytes).unwrap();
    fixture.run(&["verify", "out"]).fails(1, "dev1/layers/scanned/wq: expected 96 bytes, found 95");
}

#[test]
fn a_rewritten_configuration_keeps_its_other_contents() {
    let fixture = Fixture::new();
    let text =
        r#"{"torch_dtype": "bfloat16", "time_step_limit": [0.0, Infinity], "factor": 0.9452706955539223, "x": "NaN"}"#;
    fixture.write("model/config.json", text);
    let shown = fixture.run(&["cat", "model", "hf/config.json", "--dtype", "f32"]).ok().text();
    let words = |text: &str| text.split_whitespace().collect::<String>();
    assert_eq!(words(&shown), words(&text.replace("bfloat16", "float32")));
}

#[test]
fn a_rule_for_an_axis_that_the_mesh_lacks_is_reported() {
    let fixture = Fixture::new();
    fixture.write("rules.toml", "[[shard_rules]]\nmatch = \"embed\"\nspec = [\"fdsp\", \"-\"]\n");
    let warnings = |mesh: &[&str]| {
        let plan = ["plan", "model", "--shard", "rules.toml", "--json"];
        let json = fixture.run(&[&plan, mesh].concat()).ok().json();
        json["views"][0]["warnings"].clone()
    };
    assert_eq!(
        warnings(&["--mesh", "fsdp=2"]),
        json!(["sharding rules name the mesh axis \"fdsp\", which the mesh does not have"])
    );
    assert_eq!(warnings(&[]), json!([]));
}

#[test]
fn doctor_checks_everything() {
    let json = ran(program().args(["doctor", "--json"])).json();
    let names: Vec<_> =
        json["checks"].as_array().unwrap().iter().map(|check| check["name"].as_str().unwrap()).collect();
    let tried = if can_mount() { "mount" } else { "mounts" };
    for name in ["kernel", "/dev/fuse", "rights", "fusermount3", tried, "passthrough", "memory", "hub cache", "mounts"]
    {
        assert!(names.contains(&name), "{name}: {names:?}");
    }
    for check in json["checks"].as_array().unwrap() {
        assert_eq!(check["state"] == "ok", check["advice"] == "", "{check}");
    }
}

/// Unmounts when dropped, in every case.
struct Mounted<'a>(&'a Fixture);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let ran = self.0.run(&["umount", "--lazy", "mnt"]);
        assert!(std::thread::panicking() || ran.code == 0 || ran.err.contains("not mounted"), "{}", ran.err);
    }
}

#[test]
fn a_mount_lives_from_mount_to_umount() {
    if !can_mount() {
        return;
    }
    let fixture = Fixture::new();
    fs::create_dir(fixture.path("mnt")).unwrap();
    let ran = fixture.run(&["mount", "model", "mnt", "--mesh", "fsdp=2", "-o", "dtype=keep", "-q"]).ok();
    let mounted = Mounted(&fixture);
    assert_eq!((ran.text().as_str(), ran.err.as_str()), ("", ""));
    assert_eq!(fs::read(fixture.path("mnt/dev1/layers/scanned/wq")).unwrap(), stacked(3, 6));
    fixture.run(&["mount", "model", "mnt"]).fails(1, "already mounted");
    fixture.run(&["mount", "model", "mnt/dev1"]).fails(1, "is a directory of the mount on");

    let json = fixture.run(&["status", "mnt", "--json"]).ok().json();
    let mount = &json["mounts"][0];
    assert_eq!((&mount["health"], &mount["views"][0]["mesh"]), (&json!("healthy"), &json!("fsdp=2")));
    let process = fs::read_to_string(format!("/proc/{}/comm", mount["pid"])).unwrap();
    assert!(process.starts_with("ckfs"), "{process}");
    assert_eq!(mount["source"], json!(fixture.path("model").canonicalize().unwrap().display().to_string()));
    assert!(mount["stats"]["ops"]["read"]["count"].as_u64().unwrap() > 0);
    let text = fixture.run(&["status", "mnt"]).ok().text();
    assert!(
        text.contains(&format!("health  healthy, process {}", mount["pid"])) && text.contains("mesh fsdp=2"),
        "{text}"
    );

    let text = fixture.run(&["verify", "mnt", "--full"]).ok().text();
    assert!(text.ends_with("compared, no difference\n"), "{text}");
    for command in ["verify", "sums"] {
        let refused = "mnt: is a mount, which says by itself how it was made; --mesh, --dtype: only for sources";
        fixture.run(&[command, "mnt", "--mesh", "fsdp=4", "--dtype", "f32"]).fails(1, refused);
    }
    fixture.run(&["umount", "--stale", "mnt"]).ok();
    assert!(fixture.path("mnt/dev1").is_dir(), "a live mount is left alone");
    let state = fixture.path("state");
    let last = |args: &[&str]| {
        let mut command = program();
        command.args(args).current_dir(fixture.path("")).env("XDG_STATE_HOME", &state);
        self::ran(&mut command)
    };
    let explained = fixture.run(&["explain", "mnt/dev1/layers/scanned/wq"]).ok().text();
    assert!(explained.contains("model.layers.1.self_attn.q_proj.weight"), "{explained}");
    last(&["status", "--last", "mnt"]).fails(1, "has no configuration of a mount of yours there");
    let shown = fs::read_to_string(fixture.path("mnt/.ckfs/config.toml")).unwrap();
    fixture.run(&["umount", "mnt"]).ok();
    assert!(!fixture.path("mnt/dev1").exists());
    drop(mounted);
    // What the mount showed is kept after its end, and mounts the same again.
    fixture.write("c.toml", &shown);
    last(&["mount", "--config", "c.toml", "-q"]).ok();
    last(&["umount", "mnt"]).ok();
    for args in [&["status", "--last", "mnt"][..], &["status", "--last"]] {
        assert_eq!(last(args).ok().text(), shown);
    }
}

#[test]
fn views_are_mounted_side_by_side() {
    if !can_mount() {
        return;
    }
    let fixture = Fixture::new();
    fs::create_dir(fixture.path("mnt")).unwrap();
    fixture.write(
        "c.toml",
        "source = \"model\"\nmountpoint = \"mnt\"\n[view.a]\nmesh = \"fsdp=2\"\n[view.b]\ndtype = \"f32\"\n[mount]\nthreads = 3\n",
    );
    ran(program().args(["mount", "--config"]).arg(fixture.path("c.toml")).current_dir("/")).ok();
    let mounted = Mounted(&fixture);
    assert_eq!(fs::read(fixture.path("mnt/a/dev1/layers/scanned/wq")).unwrap(), stacked(3, 6));
    assert_eq!(fs::metadata(fixture.path("mnt/b/full/embed")).unwrap().len(), 96);
    let json = fixture.run(&["status", "mnt", "--json"]).ok().json();
    assert_eq!(json["mounts"][0]["views"].as_array().unwrap().len(), 2);
    fixture.run(&["verify", "mnt"]).ok();
    fixture.run(&["umount", "--config", "c.toml"]).ok();
    drop(mounted);
}

#[test]
fn leftovers_of_a_killed_daemon_are_found_and_removed() {
    if !can_mount() {
        return;
    }
    let fixture = Fixture::new();
    fs::create_dir(fixture.path("mnt")).unwrap();
    let log = fixture.path("log");
    let mounted = Mounted(&fixture);
    fixture.run(&["mount", "model", "mnt", "-v", "--log-file", "log"]).ok();
    assert!(!fs::read_to_string(&log).unwrap_or_default().contains("ERROR"));
    let own = |pid: &PathBuf| {
        let here = fs::read_link(pid.join("exe")).is_ok_and(|exe| exe == Path::new(env!("CARGO_BIN_EXE_ckfs")));
        // Only this daemon has the log file open.
        here && fs::read_link(pid.join("fd/2")).is_ok_and(|file| file == log.canonicalize().unwrap())
    };
    let mut processes = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
    let daemon = processes.find(own).unwrap();
    let pid: i32 = daemon.file_name().unwrap().to_str().unwrap().parse().unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).unwrap();
    while daemon.join("fd/2").exists() {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let ran = fixture.run(&["status", "mnt"]);
    assert_eq!((ran.code, ran.text().contains("health  stale")), (1, true), "{}{}", ran.text(), ran.err);
    fixture.run(&["umount", "--stale", "--lazy", "mnt"]).ok();
    fixture.run(&["status", "mnt"]).fails(1, "no ckfs mount");
    drop(mounted);
}

#[test]
fn the_starter_reports_a_failed_start() {
    if !can_mount() {
        return;
    }
    let fixture = Fixture::new();
    fs::create_dir(fixture.path("mnt")).unwrap();
    let ran = fixture.run(&["mount", "model", "mnt", "--mesh", "fsdp=4", "--even"]).fails(1, "4 parts");
    assert!(ran.err.starts_with("ckfs: error: 8 problems:\n  ") || ran.err.contains(" problems:\n  "), "{}", ran.err);
    assert_eq!(ran.err.matches("ckfs: error").count(), 1, "{}", ran.err);
    fixture.run(&["mount", "absent", "mnt"]).fails(1, "absent");
}

#[test]
fn mount_ckfs_accepts_the_arguments_of_mount_8() {
    if !can_mount() {
        return;
    }
    let fixture = Fixture::new();
    fs::create_dir(fixture.path("mnt")).unwrap();
    let helper = fixture.path("mount.ckfs");
    // A copy: through a symbolic link the program would find its original name.
    // By another process: a child of a parallel test would inherit a descriptor that writes it ("Text file busy").
    assert!(Command::new("cp").arg(env!("CARGO_BIN_EXE_ckfs")).arg(&helper).status().unwrap().success());
    let model = fixture.path("model");
    let run = |args: &[&str]| {
        ran(Command::new(&helper)
            .arg(&model)
            .arg(fixture.path("mnt"))
            .args(args)
            .env_remove("CKFS_LOG")
            .current_dir("/"))
    };
    run(&["-o", "ro,nonsense"]).fails(2, "unknown option \"nonsense\"");
    let mounted = Mounted(&fixture);
    run(&["-o", "rw,nodev,mesh=fsdp=2:tensor=3,x-systemd.automount"]).ok();
    assert!(fixture.path("mnt/mesh/fsdp=1,tensor=2").is_symlink());
    fixture.run(&["umount", "mnt"]).ok();
    run(&["-s", "-o", "ro,nonsense,mesh=fsdp=2"]).ok();
    drop(mounted);
}

#[test]
fn demo_runs_by_itself() {
    let fixture = Fixture::new();
    let ran = fixture.run(&["demo", "--dir", "demo"]);
    if !can_mount() {
        assert_eq!(ran.code, 1);
        assert!(ran.err.contains("/dev/fuse") && ran.text().contains("ckfs cat"), "{}", ran.err);
        return;
    }
    let text = ran.ok().text();
    assert!(text.contains("safetensors/") && text.contains("no difference") && text.contains("Next"), "{text}");
    assert!(text.lines().count() <= 25, "{text}");
    assert!(!fixture.path("demo").exists(), "cleaned up");
}
