use super::*;

fn sharding(shape: &[u64], placements: &[MeshPlacement]) -> MeshSharding {
    let count: u64 = shape.iter().product();
    let mesh = RankMesh { shape: shape.to_vec(), ranks: (0..count).collect() };
    MeshSharding { mesh: Arc::new(mesh), placements: placements.to_vec(), order: (0..placements.len()).collect() }
}

/// The elements of one axis that each rank has.
fn parts(sharding: &MeshSharding, extent: u64) -> Vec<Vec<u64>> {
    let elements = |rank: &u64| {
        let coordinate = sharding.mesh.coordinate(*rank).unwrap();
        let runs = sharding.runs(&[extent], &coordinate).unwrap();
        runs[0].iter().flat_map(|(first, len)| *first..first + len).collect()
    };
    sharding.mesh.ranks.iter().map(elements).collect()
}

#[test]
fn an_axis_is_cut_as_torch_chunk_cuts_it() {
    let one = |count| sharding(&[count], &[MeshPlacement::Shard { axis: 0 }]);
    assert_eq!(parts(&one(4), 6), [vec![0, 1], vec![2, 3], vec![4, 5], vec![]]);
    assert_eq!(parts(&one(4), 2), [vec![0], vec![1], vec![], vec![]]);
    assert_eq!(parts(&one(2), 0).concat().len(), 0);
}

#[test]
fn a_strided_axis_is_cut_by_the_later_mesh_axis_first() {
    let both = sharding(&[2, 2], &[MeshPlacement::Strided { axis: 0, split: 2 }, MeshPlacement::Shard { axis: 0 }]);
    assert_eq!(parts(&both, 10), [vec![0, 1, 2], vec![5, 6, 7], vec![3, 4], vec![8, 9]]);
    assert_eq!(parts(&both, 3), [vec![0], vec![2], vec![1], vec![]]);
    // The same, said by an order.
    let mut ordered = sharding(&[2, 2], &[MeshPlacement::Shard { axis: 0 }; 2]);
    ordered.order = vec![1, 0];
    assert_eq!(parts(&ordered, 10), parts(&both, 10));
}

#[test]
fn every_layout_covers_each_element_once_for_each_copy() {
    let placements =
        |split| [MeshPlacement::Replicate, MeshPlacement::Shard { axis: 0 }, MeshPlacement::Strided { axis: 0, split }];
    for extent in 0..30 {
        for (first, second) in [(2, 3), (3, 2), (4, 2), (1, 5)] {
            for left in placements(second) {
                // A strided axis says how the later one cuts.
                let right = if matches!(left, MeshPlacement::Strided { .. }) {
                    vec![MeshPlacement::Shard { axis: 0 }]
                } else {
                    placements(1).to_vec()
                };
                for right in right {
                    let layout = sharding(&[first, second], &[left, right]);
                    let mut copies = 1;
                    for (placement, count) in [(left, first), (right, second)] {
                        copies *= if placement == MeshPlacement::Replicate { count } else { 1 };
                    }
                    let mut found: Vec<u64> = parts(&layout, extent).concat();
                    found.sort_unstable();
                    let expected: Vec<u64> = (0..extent).flat_map(|at| (0..copies).map(move |_| at)).collect();
                    assert_eq!(found, expected, "{extent} over {first} and {second} by {left:?}, {right:?}");
                    let own = layout
                        .mesh
                        .ranks
                        .iter()
                        .filter(|rank| !layout.is_copy(&layout.mesh.coordinate(**rank).unwrap()));
                    assert_eq!(own.count() as u64 * copies, first * second);
                }
            }
        }
    }
}

#[test]
fn a_split_factor_without_end_does_not_count() {
    let layout = sharding(&[2], &[MeshPlacement::Strided { axis: 0, split: RANKS_MAX }]);
    assert_eq!(parts(&layout, 3), [vec![0, 1, 2], vec![]]);
    assert_eq!(layout.runs(&[1 << 40], &[0]), None, "too many runs");
}

#[test]
fn what_may_be_named_is_a_closed_list() {
    for (module, name) in [("torch.distributed.tensor", "DTensor"), ("torch._tensor", "_rebuild_from_type_v2")] {
        assert!(is_allowed(module, name), "{module}.{name}");
        assert!(!torch_state::is_allowed(module, name), "{module}.{name} in a file that is no rank's");
    }
    for (module, name) in [("builtins", "eval"), ("torch.distributed", "init_process_group"), ("posix", "system")] {
        assert!(!is_allowed(module, name), "{module}.{name}");
    }
}

#[test]
fn ranks_ascend_along_each_axis_or_not() {
    let mesh = |shape: &[u64], ranks: &[u64]| RankMesh { shape: shape.to_vec(), ranks: ranks.to_vec() };
    for (shape, ranks, expected) in [
        (vec![2, 2], vec![0, 1, 2, 3], true),
        (vec![2, 2], vec![0, 2, 1, 3], true),
        (vec![2, 2], vec![2, 0, 3, 1], false),
        (vec![2, 2], vec![2, 3, 0, 1], false),
        (vec![3], vec![4, 7, 9], true),
        (vec![3], vec![4, 9, 7], false),
        (vec![2, 1, 2], vec![5, 6, 7, 8], true),
        (vec![1, 1], vec![0], true),
    ] {
        assert_eq!(mesh(&shape, &ranks).ascends(), expected, "{ranks:?}");
    }
}
