//! Models of what threads do with the parts of this crate: each runs in many orders of its threads.
//!
//! Where the time of waits never ends ([`TIMES_END`](super::primitives::TIMES_END)), a notification that is lost is a model that stands still, which is found.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use shuttle::{
    Config, MaxSteps, Runner,
    scheduler::{PctScheduler, RandomScheduler},
    thread,
};

use super::{
    Account, BoxedJob, BufferLimit, BufferPool, ChangeCount, Demand, Event, Next, Pool, PoolOptions, Queue, Request,
    Reservation, RoomPolicy, Shelf, SingleFlight, Situation, Sizing, Verdict, Weight, buffers::Buffer,
    primitives::TIMES_END,
};

/// Orders of each kind.
const RUNS: usize = 500;

/// Steps of a model, far more than any needs: one that takes more waits for something that never comes.
const STEPS_MAX: usize = 20_000;

/// Runs a model in many orders, with times that end or never do.
fn check_with(times_end: bool, model: impl Fn() + Send + Sync + Clone + 'static) {
    let model = move || {
        TIMES_END.set(times_end);
        model();
    };
    let mut config = Config::new();
    config.max_steps = MaxSteps::FailAfter(STEPS_MAX);
    Runner::new(RandomScheduler::new(RUNS), config.clone()).run(model.clone());
    Runner::new(PctScheduler::new(3, RUNS), config).run(model);
}

fn check(model: fn()) {
    check_with(false, model);
    check_with(true, model);
}

/// The numbers of what happens; of the standard library, so that they add no order of threads.
type Count = Arc<AtomicUsize>;

fn add(count: &AtomicUsize) -> usize {
    count.fetch_add(1, Ordering::SeqCst) + 1
}

fn get(count: &AtomicUsize) -> usize {
    count.load(Ordering::SeqCst)
}

fn pool(threads_max: usize) -> Pool<VecDeque<BoxedJob>> {
    Pool::of_closures(PoolOptions { name: "model", threads_max, idle: Duration::from_secs(1) })
}

/// Waits until all clones of a count are dropped: of threads that ended, and of jobs that were done.
fn wait_for_drop(count: &Count) {
    while Arc::strong_count(count) > 1 {
        thread::yield_now();
    }
}

#[test]
fn a_pool_runs_each_job_once_and_ends() {
    check(|| {
        let (pool, ended) = (Arc::new(pool(2)), Count::default());
        let runs: Arc<[AtomicUsize]> = (0..4).map(|_| AtomicUsize::new(0)).collect();
        let submit = |pool: &Pool<_>, number: usize| {
            let (runs, ended) = (Arc::clone(&runs), Arc::clone(&ended));
            pool.submit(move || {
                add(&runs[number]);
                thread::yield_now();
                drop(ended);
            });
        };
        submit(&pool, 0);
        let other = {
            let (pool, runs, ended) = (Arc::clone(&pool), Arc::clone(&runs), Arc::clone(&ended));
            thread::spawn(move || {
                for number in [1, 2] {
                    let (runs, ended) = (Arc::clone(&runs), Arc::clone(&ended));
                    pool.submit(move || {
                        add(&runs[number]);
                        drop(ended);
                    });
                }
            })
        };
        submit(&pool, 3);
        assert!(pool.threads().all <= 2);
        other.join().unwrap();
        drop(pool);
        wait_for_drop(&ended);
        assert!(runs.iter().all(|runs| get(runs) == 1));
    });
}

#[test]
fn a_job_that_comes_while_threads_become_idle_is_run() {
    check(|| {
        let pool = pool(1);
        for _ in 0..3 {
            let ran = Count::default();
            let job = Arc::clone(&ran);
            pool.submit(move || drop(job));
            // The next one comes while the thread becomes idle, or ends.
            wait_for_drop(&ran);
        }
    });
}

#[test]
fn jobs_that_wait_for_each_other_are_run_by_as_many_threads() {
    check(|| {
        let (pool, meeting) = (pool(2), Count::default());
        for _ in 0..2 {
            let meeting = Arc::clone(&meeting);
            pool.submit(move || {
                add(&meeting);
                while get(&meeting) < 2 {
                    thread::yield_now();
                }
            });
        }
        wait_for_drop(&meeting);
    });
}

#[test]
fn a_panic_ends_no_thread_and_a_lowered_bound_ends_one() {
    check(|| {
        let (pool, ran) = (pool(2), Count::default());
        for panics in [true, false, false] {
            let ran = Arc::clone(&ran);
            pool.submit(move || {
                add(&ran);
                assert!(!panics, "as a model");
            });
        }
        pool.set_threads_max(1);
        let last = Arc::clone(&ran);
        pool.submit(move || assert!(add(&last) <= 4));
        wait_for_drop(&ran);
        assert_eq!(get(&ran), 4);
    });
}

/// A queue of which only one job may run at a time.
#[derive(Default)]
struct OneByOne {
    jobs: usize,
    runs: bool,
}

impl Queue for OneByOne {
    type Job = ();
    type Done = ();

    fn take(&mut self) -> Option<()> {
        (self.ready() > 0).then(|| {
            self.jobs -= 1;
            self.runs = true;
        })
    }

    fn ready(&self) -> usize {
        usize::from(self.jobs > 0 && !self.runs)
    }

    fn done(&mut self, (): ()) {
        self.runs = false;
    }
}

#[test]
fn what_becomes_ready_by_the_end_of_a_job_is_run() {
    check(|| {
        let (inside, ran) = (Count::default(), Count::default());
        let counts = (Arc::clone(&inside), Arc::clone(&ran));
        let run = move |()| {
            assert_eq!(add(&counts.0), 1, "one at a time");
            thread::yield_now();
            counts.0.fetch_sub(1, Ordering::SeqCst);
            add(&counts.1);
        };
        let options = PoolOptions { name: "model", threads_max: 2, idle: Duration::from_secs(1) };
        let pool = Pool::new(options, OneByOne::default(), run);
        for _ in 0..3 {
            pool.update(|queue, _| queue.jobs += 1);
        }
        while get(&ran) < 3 {
            thread::yield_now();
        }
        drop(pool);
        wait_for_drop(&ran);
    });
}

#[test]
fn a_watch_misses_no_change() {
    check(|| {
        let (changes, value) = (Arc::new(ChangeCount::default()), Count::default());
        let other = {
            let (changes, value) = (Arc::clone(&changes), Arc::clone(&value));
            thread::spawn(move || {
                for _ in 0..2 {
                    add(&value);
                    changes.note();
                }
            })
        };
        let mut watch = changes.watch();
        while get(&value) < 2 {
            watch.wait(Duration::from_secs(1));
        }
        drop(watch);
        other.join().unwrap();
    });
}

/// A value in a buffer, as decoded chunks are.
struct Chunk(Buffer<Vec<u8>>);

impl Weight for Chunk {
    fn weight_bytes(&self) -> usize {
        self.0.memory_bytes()
    }
}

/// A caller without room waits for some.
struct Waiting {
    buffers: BufferPool<Vec<u8>>,
    bytes_max: usize,
}

impl RoomPolicy<usize, Chunk> for Waiting {
    type Ask = usize;
    type Room = Buffer<Vec<u8>>;
    type Error = &'static str;

    fn room(
        &mut self,
        shelf: &mut Shelf<usize, Chunk>,
        _: &usize,
        ask: &usize,
        demand: Demand,
        _: Situation,
    ) -> Verdict<Buffer<Vec<u8>>, Chunk> {
        if let Some([room]) = self.buffers.reserve([*ask], BufferLimit::Bytes(self.bytes_max)) {
            return Verdict::Make(room, Vec::new());
        }
        match shelf.pop_lru() {
            Some((_, chunk)) if demand == Demand::Reader => Verdict::Drop(chunk),
            Some(_) | None => Verdict::Wait,
        }
    }
}

type Chunks = SingleFlight<usize, Chunk, Waiting>;

fn chunks(bytes_max: usize) -> (Arc<Chunks>, BufferPool<Vec<u8>>) {
    let changes = Arc::<ChangeCount>::default();
    let sizing = Sizing { memory_len: |len| len, lengths_max: 2 };
    let buffers = BufferPool::new(sizing, bytes_max / 2, Arc::clone(&changes));
    let policy = Waiting { buffers: buffers.clone(), bytes_max };
    (Arc::new(SingleFlight::new(policy, changes)), buffers)
}

fn request<V>(demand: Demand) -> Request<'static, V, &'static str> {
    Request { demand, give_up: &|| None, event: &|_| () }
}

fn read(chunks: &Chunks, key: usize, make: impl FnOnce(&mut [u8])) -> Arc<Chunk> {
    let made = chunks.get(key, &10, &request(Demand::Reader), |mut buffer| {
        buffer.make();
        make(&mut buffer);
        Ok(Chunk(buffer))
    });
    made.unwrap().unwrap()
}

#[test]
fn no_value_is_made_by_two_at_a_time() {
    check(|| {
        let (chunks, _) = chunks(100);
        let made: Arc<[AtomicUsize]> = (0..2).map(|_| AtomicUsize::new(0)).collect();
        let readers: Vec<_> = (0..3)
            .map(|reader| {
                let (chunks, made) = (Arc::clone(&chunks), Arc::clone(&made));
                thread::spawn(move || {
                    for key in [reader % 2, 1 - reader % 2] {
                        let chunk = read(&chunks, key, |buffer| {
                            thread::yield_now();
                            add(&made[key]);
                            buffer.fill(u8::try_from(key).unwrap());
                        });
                        assert!(chunk.0.iter().all(|byte| usize::from(*byte) == key));
                    }
                })
            })
            .collect();
        for reader in readers {
            reader.join().unwrap();
        }
        assert_eq!((get(&made[0]), get(&made[1])), (1, 1), "there is room for both");
    });
}

#[test]
fn the_bound_holds_and_everyone_gets_room_in_the_end() {
    check(|| {
        let (chunks, buffers) = chunks(20);
        let readers: Vec<_> = (0..3)
            .map(|reader| {
                let (chunks, buffers) = (Arc::clone(&chunks), buffers.clone());
                thread::spawn(move || {
                    for key in [reader, 2] {
                        let chunk = read(&chunks, key, |_| thread::yield_now());
                        assert!(buffers.bytes() <= 20, "{}", buffers.bytes());
                        // Its room comes back by this alone, without the lock of the cache.
                        drop(chunk);
                    }
                })
            })
            .collect();
        for reader in readers {
            reader.join().unwrap();
        }
    });
}

#[test]
fn who_waits_for_room_has_it_once_a_reader_drops_its_value() {
    check(|| {
        let (chunks, _) = chunks(10);
        let held = read(&chunks, 0, |_| ());
        drop(chunks.with(|inside| inside.shelf.remove(&0)));
        let waiter = {
            let chunks = Arc::clone(&chunks);
            thread::spawn(move || drop(read(&chunks, 1, |_| ())))
        };
        thread::yield_now();
        drop(held);
        waiter.join().unwrap();
    });
}

#[test]
fn a_waiter_of_a_failed_prefetch_tries_once_itself() {
    for panics in [false, true] {
        check_with(false, move || {
            let (chunks, buffers) = chunks(100);
            let (tries, waits) = (Count::default(), Count::default());
            let prefetch = {
                let chunks = Arc::clone(&chunks);
                thread::spawn(move || {
                    let _ = chunks.prefetch(
                        |inside| {
                            if inside.has(&0) { Next::None } else { Next::Make(0, inside.policy.buffers.take(10)) }
                        },
                        |_, _| {
                            thread::yield_now();
                            assert!(!panics, "as a model");
                            Err("its time is over")
                        },
                    );
                })
            };
            let reader = {
                let (chunks, tries, waits) = (Arc::clone(&chunks), Arc::clone(&tries), Arc::clone(&waits));
                thread::spawn(move || {
                    let event = |event: Event<'_, Chunk>| match event {
                        Event::Waits => _ = add(&waits),
                        Event::Makes => _ = add(&tries),
                        Event::Found(_) | Event::Dropped(_) => {}
                    };
                    let request = Request { demand: Demand::Reader, give_up: &|| None, event: &event };
                    let made = chunks.get(0, &10, &request, |buffer| Ok(Chunk(buffer)));
                    assert!(made.unwrap().is_ok());
                })
            };
            reader.join().unwrap();
            prefetch.join().unwrap();
            assert_eq!(get(&tries), 1);
            assert!(get(&waits) <= 1);
            assert_eq!(buffers.taken_bytes(), 10, "what failed left its room");
        });
    }
}

#[test]
fn readers_share_a_failure_that_is_theirs_and_none_waits_for_ever() {
    check(|| {
        let (chunks, _) = chunks(100);
        let tries = Count::default();
        let readers: Vec<_> = (0..3)
            .map(|_| {
                let (chunks, tries) = (Arc::clone(&chunks), Arc::clone(&tries));
                thread::spawn(move || {
                    let made = chunks.get(0, &10, &request(Demand::Reader), |_| {
                        add(&tries);
                        thread::yield_now();
                        Err("damaged")
                    });
                    assert_eq!(made.unwrap().err(), Some("damaged"));
                })
            })
            .collect();
        for reader in readers {
            reader.join().unwrap();
        }
        assert!((1..=3).contains(&get(&tries)));
    });
}

#[test]
fn a_maker_that_panics_leaves_the_next_one_to_make_it() {
    check(|| {
        let (chunks, _) = chunks(100);
        let tries = Count::default();
        let readers: Vec<_> = (0..3)
            .map(|_| {
                let (chunks, tries) = (Arc::clone(&chunks), Arc::clone(&tries));
                thread::spawn(move || {
                    let make = |buffer| {
                        thread::yield_now();
                        assert!(add(&tries) > 1, "as a model");
                        Ok(Chunk(buffer))
                    };
                    let get = || chunks.get(0, &10, &request(Demand::Reader), make);
                    std::panic::catch_unwind(std::panic::AssertUnwindSafe(get)).map(|made| made.unwrap().is_ok())
                })
            })
            .collect();
        let ends = readers.into_iter().map(|reader| reader.join().unwrap());
        let ends: Vec<bool> = ends.map(|end| matches!(end, Ok(true))).collect();
        assert_eq!(ends.iter().filter(|is_made| **is_made).count(), 2, "all but the one that panicked");
        assert_eq!(get(&tries), 2);
    });
}

#[test]
fn prefetches_and_readers_make_each_value_once() {
    check(|| {
        let (chunks, _) = chunks(100);
        let made = Count::default();
        let others: Vec<_> = (0..2)
            .map(|_| {
                let (chunks, made) = (Arc::clone(&chunks), Arc::clone(&made));
                thread::spawn(move || {
                    let next = |inside: &mut super::CacheInside<usize, Chunk, Waiting>| {
                        let key = (0..2).find(|key| !inside.has(key));
                        key.map_or(Next::None, |key| Next::Make(key, inside.policy.buffers.take(10)))
                    };
                    let make = |_, buffer| {
                        add(&made);
                        Ok(Chunk(buffer))
                    };
                    while chunks.prefetch(next, make).is_some() {}
                })
            })
            .collect();
        for key in 0..2 {
            read(&chunks, key, |_| _ = add(&made));
        }
        for other in others {
            other.join().unwrap();
        }
        assert_eq!(get(&made), 2);
    });
}

/// A value that counts, as tiles are.
struct Tile(Reservation);

impl Weight for Tile {
    fn weight_bytes(&self) -> usize {
        self.0.bytes()
    }
}

/// A caller without room is refused.
struct Refusing {
    held: Account,
    bytes_max: usize,
}

impl RoomPolicy<usize, Tile> for Refusing {
    type Ask = usize;
    type Room = Reservation;
    type Error = &'static str;

    fn room(
        &mut self,
        shelf: &mut Shelf<usize, Tile>,
        _: &usize,
        ask: &usize,
        _: Demand,
        _: Situation,
    ) -> Verdict<Reservation, Tile> {
        let outside = self.held.bytes() - shelf.bytes();
        if outside + ask > self.bytes_max {
            return Verdict::Refuse;
        }
        let room = self.held.reserve(*ask);
        let dropped = shelf.pop_until(self.bytes_max - outside - ask);
        Verdict::Make(room, dropped)
    }
}

#[test]
fn who_is_refused_does_not_wait_and_what_is_made_counts_from_before() {
    check(|| {
        let held = Account::default();
        let tiles = Arc::new(SingleFlight::new(Refusing { held: held.clone(), bytes_max: 20 }, Arc::default()));
        let made = Count::default();
        let readers: Vec<_> = (0..3)
            .map(|reader| {
                let (tiles, held, made) = (Arc::clone(&tiles), held.clone(), Arc::clone(&made));
                thread::spawn(move || {
                    for key in [reader, 3] {
                        let tile = tiles.get(key, &10, &request(Demand::Reader), |room| {
                            // Those that others drop still count until they are gone.
                            assert!(held.bytes() <= 40, "{}", held.bytes());
                            thread::yield_now();
                            Ok(Tile(room))
                        });
                        if let Some(tile) = tile {
                            add(&made);
                            assert_eq!(tile.unwrap().0.bytes(), 10);
                        }
                    }
                })
            })
            .collect();
        for reader in readers {
            reader.join().unwrap();
        }
        assert!(get(&made) >= 2 && held.bytes() <= 20, "{}", held.bytes());
    });
}
