//! The forms of the settings compared with each other: files, options, defaults.

use std::path::{Path, PathBuf};

use ckfs_tensor::DType;

use super::{value::SettingValue, *};

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::of_text(text, Path::new("x.toml"), Path::new("/base"))
}

#[test]
fn views_inherit_and_rules_of_their_own_come_first() {
    let config = parse(
        r#"
        source = "org/name"
        mountpoint = "mnt"
        dtype = "bf16"
        [[cast]]
        match = "*norm*"
        dtype = "keep"
        [view.train]
        mesh = "fsdp=4,tensor=2"
        devices = "0-3,6"
        [[view.train.cast]]
        match = "final_norm"
        dtype = "f32"
        [[view.train.shard_rules]]
        match = "wq"
        spec = ["fsdp", "-", "", ["tensor", "fsdp"]]
        [view.rollout]
        layout = "hf"
        dtype = "keep"
        [mount]
        cache_bytes = "64M"
        log_file = "log"
        "#,
    )
    .unwrap();
    assert_eq!(config.source.as_deref(), Some("org/name"));
    assert_eq!(config.mountpoint.as_deref(), Some(Path::new("/base/mnt")));
    assert_eq!(config.mount.cache_bytes, Some(ByteCount(64 << 20)));
    assert_eq!(config.mount.log_file.as_deref(), Some(Path::new("/base/log")));
    let [rollout, train] = &config.views[..] else { panic!("{config:?}") };
    let (rollout, train) = (&rollout.settings, &train.settings);
    assert_eq!((&rollout.layout, rollout.dtype), (&Some(LayoutChoice::Named("hf")), Some(DtypeChoice(None))));
    assert_eq!(train.dtype, Some(DtypeChoice(Some(DType::BF16))));
    let casts: Vec<_> = train.cast.iter().map(|rule| (rule.pattern.text(), rule.dtype)).collect();
    assert_eq!(casts, [("final_norm", Some(DType::F32)), ("*norm*", None)]);
    assert_eq!(train.devices, Some(Devices(vec![0, 1, 2, 3, 6])));
    let spec: Vec<Vec<String>> = vec![vec!["fsdp".into()], vec![], vec![], vec!["tensor".into(), "fsdp".into()]];
    assert_eq!(train.shard_rules[0].spec, spec);
}

#[test]
fn a_written_configuration_reads_back_as_the_same() {
    let texts = [
        "",
        "source = \"/x\"\nmesh = \"fsdp=2\"\nunscanned = true\neven = false\nchunk_bytes = \"64M\"\n",
        "dtype = \"keep\"\nshard = \"none\"\n[[shard_rules]]\nmatch = \"/a\\\\.b/\"\nspec = [\"-\", [\"a\", \"b\"]]\n",
        "mesh = \"a=2\"\n[[cast]]\nmatch = \"*\"\ndtype = \"f16\"\n[view.x]\n[view.y]\nmesh = \"b=3\"\n\
         [mount]\nthreads = 3\nsource_io = \"pread\"\ndrain_seconds = 4\n",
    ];
    for text in texts {
        let config = parse(text).unwrap();
        let written = config.to_toml().unwrap();
        assert_eq!(parse(&written).unwrap(), config, "{written}");
    }
}

/// Each key above all tables, with a value that is not the default.
const EVERY_TOP_KEY: &[(&str, &str)] = &[
    ("source", "source = 'o/n'"),
    ("config_from", "config_from = 'o/n'"),
    ("fill_from", "fill_from = 'o/n'"),
    ("base", "base = 'o/n'"),
    ("average", "average = 'last=5'"),
    ("mountpoint", "mountpoint = 'm'"),
];

const EVERY_VIEW_KEY: &[(&str, &str)] = include!("every_view_key.in");

const EVERY_MOUNT_KEY: &[(&str, &str)] = &[
    ("mkdir", "mkdir = true"),
    ("allow_other", "allow_other = true"),
    ("file_mode", "file_mode = '0440'"),
    ("dir_mode", "dir_mode = '0750'"),
    ("uid", "uid = 1000"),
    ("gid", "gid = 0"),
    ("follow_symlinks", "follow_symlinks = true"),
    ("duplicates", "duplicates = 'last'"),
    ("variant", "variant = 'fp16'"),
    ("training_state", "training_state = true"),
    ("allow_unfinished", "allow_unfinished = true"),
    ("steps", "steps = 'latest=3'"),
    ("steps_poll", "steps_poll = '5s'"),
    ("on_step", "on_step = 'eval \"$CKFS_STEP_PATH\"'"),
    ("source_timeout", "source_timeout = '500ms'"),
    ("offline", "offline = true"),
    ("cache_dir", "cache_dir = '/var/cache/ckfs'"),
    ("cache_disk_bytes", "cache_disk_bytes = '200G'"),
    ("prefetch", "prefetch = 'on'"),
    ("hf_cache", "hf_cache = 'share'"),
    ("allow_http", "allow_http = true"),
    ("threads", "threads = 3"),
    ("read_ahead_kb", "read_ahead_kb = 128"),
    ("cache_bytes", "cache_bytes = '1GiB'"),
    ("passthrough", "passthrough = false"),
    ("materialize", "materialize = 'copies'"),
    ("direct_io", "direct_io = ['full/*', '/npy/']"),
    ("source_io", "source_io = 'pread'"),
    ("grace_seconds", "grace_seconds = 0"),
    ("drain_seconds", "drain_seconds = '2min'"),
    ("log_file", "log_file = 'log'"),
    ("keeper", "keeper = true"),
];

const EVERY_SERVE_KEY: &[(&str, &str)] = &[
    ("listen", "listen = '0.0.0.0:80'"),
    ("s3", "s3 = '127.0.0.1:81'"),
    ("name", "name = 'org/name'"),
    ("token_file", "token_file = 'token'"),
    ("allow_anyone", "allow_anyone = true"),
    ("allow_host", "allow_host = ['*.example.com']"),
];

#[test]
fn every_key_is_written_and_reads_back_as_the_same() {
    let known = |rows: &[(&str, &str)]| rows.iter().map(|(key, _)| (*key).to_owned()).collect::<Vec<_>>();
    let sorted = |mut keys: Vec<String>| {
        keys.sort();
        keys
    };
    for (rows, scope) in [
        (EVERY_TOP_KEY, SettingScope::Top),
        (EVERY_VIEW_KEY, SettingScope::View),
        (EVERY_MOUNT_KEY, SettingScope::Mount),
        (EVERY_SERVE_KEY, SettingScope::Serve),
    ] {
        let keys = SETTINGS.iter().filter(|row| row.scope == scope).map(Setting::toml_key).collect();
        assert_eq!(sorted(known(rows)), sorted(keys));
    }
    let same = |text: &str| {
        let config = parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        let written = config.to_toml().unwrap();
        let again = parse(&written).unwrap_or_else(|error| panic!("{written}: {error}"));
        assert_eq!(again, config, "{written}");
        config
    };
    let nothing = same("");
    for (key, text) in EVERY_TOP_KEY {
        assert_ne!(same(text), nothing, "{key} means nothing");
    }
    for (key, text) in EVERY_VIEW_KEY {
        assert_ne!(same(text), nothing, "{key} means nothing");
        let in_view = text.replacen("[[", "[[view.x.", 1).replacen("[set]", "[view.x.set]", 1);
        let in_view = if in_view.starts_with('[') { in_view } else { format!("[view.x]\n{in_view}") };
        assert_eq!(same(&in_view).views[0].settings, same(text).views[0].settings, "{key}");
    }
    for (key, text) in EVERY_MOUNT_KEY {
        assert_ne!(same(&format!("[mount]\n{text}")), nothing, "{key} means nothing");
    }
    for (key, text) in EVERY_SERVE_KEY {
        assert_ne!(same(&format!("[serve]\n{text}")), nothing, "{key} means nothing");
    }
    let lines = |rows: &[(&str, &str)]| rows.iter().flat_map(|(_, text)| [text, "\n"]).collect::<String>();
    same(
        &[
            &lines(EVERY_TOP_KEY),
            &lines(EVERY_VIEW_KEY),
            "[mount]\n",
            &lines(EVERY_MOUNT_KEY),
            "[serve]\n",
            &lines(EVERY_SERVE_KEY),
        ]
        .concat(),
    );
}

#[test]
fn values_that_toml_lacks_are_refused() {
    use std::os::unix::ffi::OsStringExt;
    let odd = PathBuf::from(std::ffi::OsString::from_vec(b"/a\xff".to_vec()));
    let mount = MountSettings { materialize: Some(Materialize::Dir(odd.clone())), ..MountSettings::default() };
    let error = Config { mount, ..Config::default() }.to_toml().unwrap_err().to_string();
    assert_eq!(error, "the configuration cannot be written as TOML: materialize: /a\u{FFFD} is not UTF-8");
    assert_eq!(Config { mountpoint: Some(odd), ..Config::default() }.to_toml().unwrap(), "");
}

#[test]
fn a_shown_configuration_is_read_without_its_files() {
    let text = "source = '/no/such/model'\nlayout = '/no/such/layout.toml'\n";
    let config = Config::without_files(text, Path::new("config.toml"), Path::new("/")).unwrap();
    assert_eq!(config.source.as_deref(), Some("/no/such/model"));
    assert!(matches!(&config.views[0].settings.layout, Some(LayoutChoice::File { text, .. }) if text.is_empty()));
}

#[test]
fn errors_name_file_and_line() {
    let rows = [
        ("mesh = \"fsdp=2\"\nmehs = \"x\"\n", "x.toml:2: unknown field `mehs`"),
        ("\n\nmesh = \"fsdp\"\n", "x.toml:3: mesh: expected name=size, found \"fsdp\""),
        ("dtype = \"i32\"", "x.toml:1: dtype: expected keep or a float type such as bf16, found \"i32\""),
        ("layout = \"x\"", "x.toml:1: layout \"x\": expected canonical, gguf, hf, "),
        ("shard = \"x\"", "x.toml:1: shard: expected auto, none, maxtext or a file *.toml, found \"x\""),
        ("devices = \"3-1\"", "x.toml:1: devices: expected numbers and ranges such as 0-3,8 or 0..4, found \"3-1\""),
        ("[[cast]]\nmatch = \"/(/\"\ndtype = \"f32\"", "x.toml:2: pattern \"/(/\": "),
        ("[[cast]]\nmatch = \"a\"", "x.toml:1: missing field `dtype`"),
        ("[[shard_rules]]\nmatch = \"a\"\nspec = [1]", "x.toml:3: expected a list with \"-\", a mesh axis"),
        ("[mount]\ncache_bytes = \"1X\"", "x.toml:2: expected a number of bytes such as"),
        ("[mount]\nfile_mode = '0448'", "x.toml:2: mode: expected octal digits from 0 to 0777 such as 0440"),
        ("[mount]\ndir_mode = '7777'", "x.toml:2: mode: expected octal digits"),
        ("[mount]\nuid = 4294967295", "x.toml:2: expected a whole number from 0 to 4294967294, found"),
        ("[mount]\nsource_timeout = '0s'", "x.toml:2: expected a time from 1ms to 8760h, found"),
        ("[mount]\ngrace_seconds = 9223372036854775807", "x.toml:2: expected a time from 0 to 8760h, found"),
        ("[mount]\ndrain_seconds = '9000h'", "x.toml:2: expected a time from 0 to 8760h, found"),
        ("[mount]\nthread = 1", "x.toml:2: unknown field `thread`"),
        ("[mount]\nthreads = 20000", "x.toml:2: expected a whole number from 1 to 512, found 20000"),
        ("[view.a]\nsource = \"x\"", "x.toml:2: `source` belongs before the first table"),
        ("a = 1\n[view.\"../x\"]\n", "x.toml:1: unknown field `a`"),
        ("\n[view.\"../x\"]\n", "x.toml:2: view \"../x\": expected a name"),
        ("mesh = ", "x.toml:1: "),
    ];
    for (text, expected) in rows {
        let found = parse(text).unwrap_err().to_string();
        assert!(found.starts_with(expected), "{text:?}: {found}");
    }
}

#[test]
fn a_former_setting_is_refused_with_its_present_equivalent() {
    let file = parse("[mount]\nwhole = 'all'").unwrap_err().to_string();
    assert!(file.starts_with("x.toml:2: unknown field `whole`: `whole` is now `materialize`: "), "{file}");
    let option = options::parse([("whole", Some("all"))]).unwrap_err();
    assert!(option.starts_with("option `whole` is now `materialize`: "), "{option}");
    for name in FORMER.iter().map(|(name, _)| *name) {
        assert!(SETTINGS.iter().all(|row| row.name != name && row.toml_key() != name), "{name} is a setting again");
    }
}

#[test]
fn materialize_takes_a_word_or_a_directory() {
    let found = |word: &str| Materialize::from_os(word.as_ref());
    assert_eq!(found("auto"), Ok(Materialize::Auto));
    assert_eq!(found("memory"), Ok(Materialize::Memory));
    assert_eq!(found("none"), Ok(Materialize::None));
    for path in ["/var/tmp", "copies", "./all"] {
        assert_eq!(found(path), Ok(Materialize::Dir(path.into())));
    }
    // Words of a former setting, and placeholders from the help, are not directories.
    for word in ["all", "tensors", "whole", "dir", "", "s3://bucket/x"] {
        assert!(found(word).unwrap_err().contains("expected auto, memory, none or a directory"), "{word}");
    }
    let written = parse("[mount]\nmaterialize = 'copies'").unwrap();
    assert_eq!(written.mount.materialize, Some(Materialize::Dir("/base/copies".into())));
}

#[test]
fn an_unknown_key_is_refused_with_the_nearest_name() {
    let found = |text: &str| parse(text).unwrap_err().to_string();
    let unknown = found("mehs = \"x\"");
    assert!(
        unknown
            .contains("unknown field `mehs`; did you mean `mesh`?\n --> x.toml:1:1\n  |\n1 | mehs = \"x\"\n  | ^^^^"),
        "{unknown}"
    );
    assert!(found("[mount]\ndrain = 3").contains("did you mean `drain_seconds`?"), "{}", found("[mount]\ndrain = 3"));
    assert!(found("quite_another = 3").contains("unknown field `quite_another`, expected one of"));
    let option = options::parse([("cache_byte", Some("3"))]).unwrap_err();
    assert_eq!(option, "unknown option `cache_byte`; did you mean `cache_bytes`?");
}

#[test]
fn a_flag_that_may_stand_alone_is_true_in_a_file() {
    let read = |value: &str| parse(&format!("dequantize = {value}")).map(|config| config.views[0].settings.dequantize);
    assert_eq!(read("true").unwrap(), Some(Dequantize::Own));
    assert_eq!(read("'f32'").unwrap(), Some(Dequantize::To(DType::F32)));
    for value in ["false", "3"] {
        let error = read(value).unwrap_err().to_string();
        assert!(error.contains("expected true or a float type such as bf16"), "{error}");
    }
}

#[test]
fn numbers_and_lists_in_files_are_as_good_as_their_texts() {
    let parse = |text: &str| FileSettings::parse(text, Path::new("x.toml")).unwrap().top.view;
    for (list, text) in [
        ("devices = [0, 1, \"4-5\"]", "devices = \"0,1,4-5\""),
        ("devices = 3", "devices = \"3\""),
        ("layers = [0, \"2..4\"]", "layers = \"0,2..4\""),
        ("[[shard_rules]]\nmatch = \"*\"\nspec = \"fsdp\"", "[[shard_rules]]\nmatch = \"*\"\nspec = [\"fsdp\"]"),
    ] {
        assert_eq!(parse(list), parse(text), "{list}");
    }
    // In a file it is written on purpose: a view without the mesh of the others.
    assert_eq!(parse("mesh = \"\"").mesh.unwrap().devices(), 1);
    let error = FileSettings::parse("devices = true", Path::new("x.toml")).unwrap_err().to_string();
    assert!(error.contains("expected a text such as \"0-3,8\", a number, or a list of these"), "{error}");
}

#[test]
fn near_values_are_proposed() {
    let rows = [
        ("layout", "maxtxt", "unknown layout `maxtxt`; did you mean `maxtext`?"),
        ("dtype", "bf61", "unknown dtype `bf61`; did you mean `bf16`?"),
        ("dtype", "kep", "unknown dtype `kep`; did you mean `keep`?"),
        ("dequantize", "bf61", "unknown dtype `bf61`; did you mean `bf16`?"),
        ("quantize", "w4a16", "unknown scheme `w4a16`; did you mean `int4`?"),
        ("mesh", "", "expected a value, found nothing: is a variable of a script not set?"),
        ("include", " ", "expected a value, found nothing: is a variable of a script not set?"),
        ("shard", "atuo", "unknown sharding `atuo`; did you mean `auto`?"),
        ("prefetch", "atuo", "unknown prefetch `atuo`; did you mean `auto`?"),
        ("source_io", "mmpa", "unknown source I/O `mmpa`; did you mean `mmap`?"),
        ("tied", "allias", "unknown tied `allias`; did you mean `alias`?"),
        ("dtype", "i32", "dtype: expected keep or a float type such as bf16, found \"i32\""),
    ];
    for (option, word, expected) in rows {
        let found = options::parse([(option, Some(word))]).unwrap_err();
        assert!(found.ends_with(expected), "{found}");
    }
}

#[test]
fn the_first_place_of_a_setting_has_precedence() {
    let said = |options: &[(&'static str, &'static str)]| {
        options::parse(options.iter().map(|(name, value)| (*name, Some(*value)))).unwrap()
    };
    let mut config =
        parse("dtype = \"f16\"\nmesh = \"a=2\"\ninclude = ['c']\n[view.x]\n[view.y]\ndtype = \"f32\"\n").unwrap();
    let mut flags = said(&[("dtype", "bf16"), ("threads", "3"), ("include", "a"), ("set", "x=1")]);
    flags.over(&said(&[("dtype", "f64"), ("timeout", "7"), ("include", "b"), ("set", "x=2"), ("set", "y=3")]));
    config.overlay(flags);
    for view in &config.views {
        let ViewSettings { dtype, mesh, include, set, .. } = &view.settings;
        assert_eq!(*dtype, Some(DtypeChoice(Some(DType::BF16))));
        assert_eq!(mesh.as_ref().map(Mesh::devices), Some(2));
        assert_eq!(include.iter().map(Pattern::text).collect::<Vec<_>>(), ["a", "b", "c"]);
        assert_eq!(set.values().map(ParamValue::text).collect::<Vec<_>>(), ["1", "3"]);
    }
    assert_eq!(config.mount.threads.map(ThreadCount::count), Some(3));
    assert_eq!(config.start_limit, "7".parse().ok());
    assert_eq!(Config::default().start_limit, "5min".parse().ok());
}

#[test]
fn rules_of_a_file_are_read() {
    let directory = tempfile::tempdir().unwrap();
    let rules = "shard = \"none\"\n[[shard_rules]]\nmatch = \"wq\"\nspec = [\"fsdp\"]\n";
    std::fs::write(directory.path().join("rules.toml"), rules).unwrap();
    let load = |text: &str| Config::of_text(text, Path::new("x.toml"), directory.path());
    let config = load("shard = \"rules.toml\"").unwrap();
    assert_eq!(config.views[0].settings.shard, Some(ShardChoice::None));
    assert_eq!(config.views[0].settings.shard_rules.len(), 1);
    assert_eq!(load(&config.to_toml().unwrap()).unwrap(), config);
    std::fs::write(directory.path().join("rules.toml"), "\nshard = \"other.toml\"").unwrap();
    assert!(load("shard = \"rules.toml\"").unwrap_err().to_string().contains("rules.toml:2: shard: expected auto"));
    assert!(load("shard = \"absent.toml\"").unwrap_err().to_string().contains("absent.toml: no such file"));
    assert!(load("layout = \"absent.toml\"").unwrap_err().to_string().contains("absent.toml: no such file"));
}

#[test]
fn options_are_flags_with_underscores() {
    let parse = |name: &'static str, value: Option<&'static str>| options::parse([(name, value)]);
    assert_eq!(parse("no_passthrough", None).unwrap().mount.passthrough, Some(false));
    assert_eq!(parse("direct_io", None).unwrap().mount.direct_io, Some(Allow::All));
    assert_eq!(parse("read_ahead", Some("64")).unwrap().mount.read_ahead_kb, Some(WholeNumber(64)));
    let errors = [
        (
            parse("threads", Some("0")),
            "invalid value '0' for '--threads <N>': expected a whole number from 1 to 512, found 0",
        ),
        (parse("even", Some("1")), "option even: expected no value, found \"1\""),
        (parse("mesh", None), "option mesh: expected mesh=VALUE"),
        (
            options::parse([("mesh", Some("a=1")), ("mesh", Some("a=1"))]),
            "the argument '--mesh <AXIS=N,...>' cannot be used multiple times",
        ),
    ];
    for (found, expected) in errors {
        assert_eq!(found.unwrap_err(), expected);
    }
    let twice =
        options::parse([("allow_missing", Some("a")), ("allow_missing", Some("b"))]).unwrap().view.allow_missing;
    assert_eq!(twice, Some(Allow::Matching(["a", "b"].map(|text| Pattern::parse(text).unwrap()).to_vec())));
}

/// Checks of the table that its types cannot express.
#[test]
fn rows_are_consistent() {
    for row in SETTINGS.iter() {
        assert_eq!(SETTINGS.iter().filter(|other| other.name == row.name).count(), 1, "{}", row.name);
        assert!(!row.is_flag || row.help.ends_with('.'), "{}: help", row.name);
        assert!(row.is_flag || row.scope != SettingScope::None, "{} cannot be said", row.name);
        let add = |word: &str| (row.field.add)(&mut Settings::default(), word.as_ref());
        assert_eq!(row.default.map_or(Ok(()), add), Ok(()), "{}: default", row.name);
        let word = match row.arity {
            Arity::Flag(word) | Arity::Optional(_, word) => add(word),
            // A list of words in lower case is a closed list.
            Arity::Required(words) if words.contains('|') => {
                let mut words = words.split('|').filter(|word| word.chars().all(|c| c.is_ascii_lowercase()));
                words.try_for_each(add)
            }
            Arity::Required(_) => Ok(()),
        };
        assert_eq!(word, Ok(()), "{}", row.name);
    }
    assert!(KEYS.starts_with("source, mountpoint, mesh, "), "{}", *KEYS);
}

#[test]
fn words_are_read_and_written() {
    for (text, written) in [
        ("0-3,8", "0-3,8"),
        ("0..4,8", "0-3,8"),
        ("..2", "0-1"),
        ("5,4,4,3", "3-5"),
        ("7", "7"),
        ("1,3,5-6", "1,3,5-6"),
    ] {
        assert_eq!(Devices::from_word(text).unwrap().text(), written);
    }
    for bad in ["", "a", "1-", "-1", "1..", "2..2", "1,,2", "0-99999999999", "0..99999999999"] {
        assert!(Devices::from_word(bad).is_err(), "{bad}");
    }
    for (text, bytes) in [("0", 0), ("512", 512), ("64M", 64 << 20), ("1 GiB", 1 << 30), ("2kb", 2048)] {
        assert_eq!(text.parse(), Ok(ByteCount(bytes)), "{text}");
    }
    for bad in ["", "x", "1X", "-1", "99999999999999999999", "99999999999T"] {
        assert!(bad.parse::<ByteCount>().is_err(), "{bad}");
    }
}
