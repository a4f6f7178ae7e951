use super::*;

/// Words as ids, in the order of the alphabet, with BERT's frame around them.
const FILE: &str = include_str!("../../../tests/text/tokenizer.json");

fn tokenizer() -> Tokenizer {
    Tokenizer::from_bytes(FILE.as_bytes()).expect("a tokenizer")
}

fn cut(most: usize, keep: Option<Keep>) -> Cut {
    Cut { most, keep }
}

#[test]
fn the_files_own_padding_and_truncation_are_known_and_not_done() {
    let tokenizer = tokenizer();
    assert_eq!((tokenizer.limit(), tokenizer.pad()), (Some(5), Some(3)));
    assert_eq!((tokenizer.added(false), tokenizer.added(true)), (2, 3));
    let tokens = tokenizer.encode("a b c d a b", None, cut(100, None)).expect("tokens");
    assert_eq!(tokens.ids, [1, 10, 11, 12, 13, 10, 11, 2]);
    assert_eq!(tokens.types, [0; 8]);
}

#[test]
fn a_pair_has_two_types() {
    let tokens = tokenizer().encode("a b", Some("c"), cut(100, None)).expect("tokens");
    assert_eq!(tokens.ids, [1, 10, 11, 2, 12, 2]);
    assert_eq!(tokens.types, [0, 0, 0, 0, 1, 1]);
}

#[test]
fn what_is_cut_keeps_its_frame_and_the_end_that_was_asked_for() {
    let tokenizer = tokenizer();
    for (text, pair, most, keep, ids) in [
        ("a b c d", None, 4, Keep::Start, &[1, 10, 11, 2][..]),
        ("a b c d", None, 4, Keep::End, &[1, 12, 13, 2]),
        ("a b c d", None, 6, Keep::End, &[1, 10, 11, 12, 13, 2]),
        ("a b c d", None, 2, Keep::Start, &[1, 2]),
        // The longer one is cut.
        ("a", Some("b c d a b"), 6, Keep::Start, &[1, 10, 2, 11, 12, 2]),
        ("a b c d a", Some("b"), 6, Keep::Start, &[1, 10, 11, 2, 11, 2]),
    ] {
        let tokens = tokenizer.encode(text, pair, cut(most, Some(keep))).expect(text);
        assert_eq!(tokens.ids, ids, "{text} {pair:?} {most} {keep:?}");
        assert_eq!(tokens.types.len(), tokens.ids.len());
    }
    let refused = tokenizer.encode("a b c d", None, cut(5, None));
    assert_eq!(refused, Err(Fault::TooLong { tokens: 6, most: 5 }));
}

#[test]
fn ids_are_taken_as_they_are_if_the_tokenizer_has_them() {
    let tokenizer = tokenizer();
    let ids = |ids: &[u32], cut| tokenizer.take(ids.to_vec(), cut).map(|tokens| tokens.ids);
    assert_eq!(ids(&[10, 11, 12], cut(3, None)), Ok(vec![10, 11, 12]));
    assert_eq!(ids(&[10, 11, 12], cut(2, Some(Keep::Start))), Ok(vec![10, 11]));
    assert_eq!(ids(&[10, 11, 12], cut(2, Some(Keep::End))), Ok(vec![11, 12]));
    assert_eq!(ids(&[10, 11, 12], cut(2, None)), Err(Fault::TooLong { tokens: 3, most: 2 }));
    assert_eq!(ids(&[10, 15], cut(2, None)), Err(Fault::Unknown { id: 15, vocabulary: 15 }));
    assert_eq!(ids(&[], cut(2, None)), Err(Fault::Empty));
}

#[test]
fn pieces_say_where_in_the_text_they_are_in_characters() {
    let pieces = tokenizer().pieces("é  b x", true).expect("pieces");
    let seen: Vec<_> = pieces.iter().map(|piece| (piece.id, &*piece.text, piece.special, piece.place)).collect();
    let expected = [
        (1, "[CLS]", true, None),
        (14, "é", false, Some((0, 1))),
        (11, "b", false, Some((3, 4))),
        (0, "x", false, Some((5, 6))),
        (2, "[SEP]", true, None),
    ];
    assert_eq!(seen, expected);
    assert_eq!(tokenizer().pieces("a", false).expect("pieces").len(), 1);
    assert_eq!(tokenizer().decode(&[1, 10, 11, 2], true), Ok("a b".to_owned()));
}

#[test]
fn what_is_no_tokenizer_is_refused() {
    for text in ["", "{}", "[]", "\u{0}"] {
        assert!(Tokenizer::from_bytes(text.as_bytes()).is_err(), "{text}");
    }
    assert!(Tokenizer::load(Path::new("/nowhere/tokenizer.json")).is_err());
}
