//! Which part of each parameter a rank holds, where ranks share the width of layers (tensor parallel) and the experts.

use crate::config::Config;
use crate::decoder::Decoder;
use crate::error::{Error, Result};
use crate::parameters::Unit;
use ringspan_candle::tensor_parallel::part;
use std::ops::Range;

/// Where a rank stands among those that share layers: pairs of its place and the number of places.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// In the tensor-parallel group.
    pub tp: (usize, usize),
    /// Among the ranks that have whole experts of their own.
    pub ep: (usize, usize),
    /// Among the ranks that share the width of an expert.
    pub moe_tp: (usize, usize),
}

impl Default for Place {
    fn default() -> Self {
        Self { tp: (0, 1), ep: (0, 1), moe_tp: (0, 1) }
    }
}

/// Which ranks hold a portion: all those whose portion has the same value. Its gradient is the sum over them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Holders {
    /// Every rank.
    All,
    /// Those with this place in their tensor-parallel group.
    Tensor(usize),
    /// Those whose query heads share this key-value head, where there are fewer of these than ranks in the group.
    KeyValueHead(usize),
    /// Those with this place among the ranks that share experts.
    Experts(usize),
    /// Those that have the same experts, whichever part of their width.
    WholeExperts(usize),
}

/// The part of a parameter that a rank holds: a rectangle of a matrix, or a stretch of a vector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Portion {
    /// The parameter.
    pub name: String,
    /// Shape of the whole parameter.
    pub whole: Vec<usize>,
    /// Rows of a matrix, elements of a vector.
    pub rows: Range<usize>,
    /// Columns of a matrix; one for a vector.
    pub columns: Range<usize>,
    /// The ranks that hold it.
    pub holders: Holders,
}

impl Portion {
    /// Its shape.
    pub fn shape(&self) -> Vec<usize> {
        match self.whole.len() {
            1 => vec![self.rows.len()],
            _ => vec![self.rows.len(), self.columns.len()],
        }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.rows.len() * self.columns.len()
    }

    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Columns of the whole parameter.
    pub fn width(&self) -> usize {
        self.whole.get(1).copied().unwrap_or(1)
    }
}

/// How a parameter is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cut {
    Whole,
    /// Whole on each rank that has the expert, or a part of its width.
    WholeOfExpert(usize),
    Rows(Along),
    Columns(Along),
}

/// What a parameter is cut along.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Along {
    /// Query heads.
    Queries,
    /// Key-value heads.
    KeyValues,
    /// The width of the feed-forward part.
    Width,
    Vocabulary,
    /// The width of an expert.
    Expert(usize),
}

/// The heads of a rank of a tensor-parallel group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heads {
    /// Query heads.
    pub queries: Range<usize>,
    /// Key-value heads; shared with neighbours where there are fewer than ranks.
    pub key_values: Range<usize>,
}

impl Heads {
    /// Those of rank `tp.0` of `tp.1`: whole groups of query heads with their key-value head where there are enough of
    /// these, and else a part of such a group.
    ///
    /// # Errors
    /// More ranks than query heads can be dealt to.
    pub fn new(config: &Config, (rank, ranks): (usize, usize)) -> Result<Self> {
        let (heads, groups) = (config.num_attention_heads, config.num_key_value_heads());
        let each = heads / groups;
        if ranks <= groups {
            let key_values = part(groups, rank, ranks);
            return Ok(Self { queries: key_values.start * each..key_values.end * each, key_values });
        }
        // The ranks of a key-value head are neighbours.
        let group = rank * groups / ranks;
        let first = |group: usize| (group * ranks).div_ceil(groups);
        let sharing = first(group + 1) - first(group);
        if ranks.div_ceil(groups) > each {
            return Err(Error::TensorParallel(format!(
                "{ranks} ranks cannot share {heads} query heads over {groups} key-value heads: each of these has {each}, so \
                 at most {heads} ranks can, and no more than {each} of them at one"
            )));
        }
        let of_group = part(each, rank - first(group), sharing);
        Ok(Self { queries: group * each + of_group.start..group * each + of_group.end, key_values: group..group + 1 })
    }
}

impl Decoder {
    /// The portions of a unit that the rank at `place` holds.
    ///
    /// # Errors
    /// More ranks than heads, widths, vocabulary or experts can be dealt to.
    pub fn portions(&self, unit: Unit, place: Place) -> Result<Vec<Portion>> {
        let heads = Heads::new(self.config(), place.tp)?;
        let portion = |(name, whole, cut): (String, Vec<usize>, Cut)| {
            let (all, width) = (0..whole[0], 0..whole.get(1).copied().unwrap_or(1));
            let along = match cut {
                Cut::Whole => return Some(Portion { name, whole, rows: all, columns: width, holders: Holders::All }),
                Cut::WholeOfExpert(expert) => {
                    let holders = self.holders_of(expert, place)?;
                    return Some(Portion { name, whole, rows: all, columns: width, holders });
                }
                Cut::Rows(along) | Cut::Columns(along) => along,
            };
            let size = if matches!(cut, Cut::Rows(_)) { all.end } else { width.end };
            let (range, holders) = self.cut(along, size, place, &heads)?;
            let (rows, columns) = if matches!(cut, Cut::Rows(_)) { (range, width) } else { (all, range) };
            Some(Portion { name, whole, rows, columns, holders })
        };
        Ok(self.unit_cuts(unit).into_iter().filter_map(portion).collect())
    }

    /// A rank's part along one dimension of this size, and who has the same; none of an expert of another rank.
    fn cut(&self, along: Along, size: usize, place: Place, heads: &Heads) -> Option<(Range<usize>, Holders)> {
        let (rank, ranks) = place.tp;
        // One rank alone holds what all hold.
        let own = if ranks == 1 { Holders::All } else { Holders::Tensor(rank) };
        let dim = self.config().head_dim();
        let wide = |heads: &Range<usize>| heads.start * dim..heads.end * dim;
        Some(match along {
            Along::Queries => (wide(&heads.queries), own),
            Along::KeyValues if ranks > self.config().num_key_value_heads() => {
                (wide(&heads.key_values), Holders::KeyValueHead(heads.key_values.start))
            }
            Along::KeyValues => (wide(&heads.key_values), own),
            Along::Width | Along::Vocabulary => (part(size, rank, ranks), own),
            Along::Expert(expert) => {
                let ((ep, of_ep), (rank, ranks)) = (place.ep, place.moe_tp);
                if !part(self.experts(), ep, of_ep).contains(&expert) {
                    return None;
                }
                let shared = of_ep * ranks > 1;
                let holders = if shared { Holders::Experts(ep * ranks + rank) } else { Holders::All };
                (part(size, rank, ranks), holders)
            }
        })
    }

    /// Who has this expert, all of it or a part of its width; none if the rank has nothing of it.
    fn holders_of(&self, expert: usize, place: Place) -> Option<Holders> {
        let ((ep, of_ep), (_, widths)) = (place.ep, place.moe_tp);
        part(self.experts(), ep, of_ep).contains(&expert).then_some(match (of_ep, widths) {
            (1, _) => Holders::All,
            // As of the expert's own matrices.
            (_, 1) => Holders::Experts(ep),
            _ => Holders::WholeExperts(ep),
        })
    }

    /// What the rank at `place` is one of the holders of, in an order that is the same for all places.
    ///
    /// # Errors
    /// As [`Self::portions`].
    pub fn holdings(&self, place: Place) -> Result<Vec<Holders>> {
        let heads = Heads::new(self.config(), place.tp)?;
        let mut all = vec![Holders::All];
        for along in [Along::Width, Along::KeyValues, Along::Expert(self.first_expert(place))] {
            let exists = !matches!(along, Along::Expert(_)) || self.experts() > 0;
            let holders = exists.then(|| self.cut(along, 0, place, &heads)).flatten();
            all.extend(holders.map(|(_, holders)| holders).filter(|holders| !all.contains(holders)));
        }
        // Nothing but adapters is whole where its expert is not.
        let adapted = self.experts() > 0 && self.lora().is_some();
        let whole = adapted.then(|| self.holders_of(self.first_expert(place), place)).flatten();
        all.extend(whole.filter(|holders| !all.contains(holders)));
        Ok(all)
    }

    fn first_expert(&self, place: Place) -> usize {
        part(self.experts(), place.ep.0, place.ep.1).start
    }

    /// Refuses more ranks than the model can be cut for: of a tensor-parallel group, sharing experts, and sharing the
    /// width of an expert.
    ///
    /// # Errors
    /// [`Error::TensorParallel`] and [`Error::ExpertParallel`], with the numbers.
    pub fn check_shares(&self, tp: usize, ep: usize, moe_tp: usize) -> Result<()> {
        Heads::new(self.config(), (0, tp))?;
        let Config { intermediate_size, vocab_size, .. } = *self.config();
        for (what, size) in [("intermediate_size", intermediate_size), ("vocab_size", vocab_size)] {
            if tp > size {
                return Err(Error::TensorParallel(format!("{tp} ranks cannot share {what} {size}")));
            }
        }
        if ep * moe_tp == 1 {
            return Ok(());
        }
        let Some(sparse) = self.model.sparse else {
            return Err(Error::ExpertParallel(format!(
                "ep {ep} x moe_tp {moe_tp} share experts, and {} has none",
                self.config().model_type
            )));
        };
        if ep > sparse.experts {
            return Err(Error::ExpertParallel(format!(
                "ep {ep} leaves ranks without one of the {} experts",
                sparse.experts
            )));
        }
        if moe_tp > sparse.wide {
            return Err(Error::ExpertParallel(format!(
                "{moe_tp} ranks cannot share the width {} of an expert",
                sparse.wide
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoder(heads: usize, kv_heads: usize) -> Decoder {
        let config = serde_json::json!({
            "model_type": "qwen3_moe", "vocab_size": 61, "hidden_size": 12, "intermediate_size": 10,
            "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 4,
            "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "norm_topk_prob": true,
            "decoder_sparse_step": 2, "rope_theta": 1e4, "tie_word_embeddings": false, "hidden_act": "silu",
        });
        Decoder::new(serde_json::from_value(config).expect("a config")).expect("supported")
    }

    /// Every element of every parameter is held by one set of holders, and by all of those.
    #[test]
    fn the_portions_of_all_places_are_the_model() {
        for (heads, kv_heads, tp, ep, moe_tp) in
            [(6, 3, 1, 1, 1), (6, 3, 2, 3, 1), (6, 2, 3, 1, 3), (6, 2, 5, 5, 2), (4, 1, 4, 2, 2), (6, 3, 3, 1, 1)]
        {
            let targets = crate::TARGETS.map(str::to_owned).to_vec();
            let lora = crate::Lora::new(3, 1.0, targets).expect("possible");
            let decoder = decoder(heads, kv_heads).with_lora(lora).expect("possible");
            decoder.check_shares(tp, ep, moe_tp).expect("possible");
            for unit in decoder.units() {
                for (name, shape) in decoder.unit_shapes(unit) {
                    let width = shape.get(1).copied().unwrap_or(1);
                    let mut held = vec![None; shape.iter().product()];
                    for at in 0..tp * ep * moe_tp {
                        let (t, e, m) = (at / (ep * moe_tp), at / moe_tp % ep, at % moe_tp);
                        let place = Place { tp: (t, tp), ep: (e, ep), moe_tp: (m, moe_tp) };
                        let portions = decoder.portions(unit, place).expect("possible");
                        for portion in portions.iter().filter(|portion| portion.name == name) {
                            assert!(decoder.holdings(place).expect("possible").contains(&portion.holders), "{name}");
                            assert!(!portion.is_empty(), "{name} at {place:?}");
                            for row in portion.rows.clone() {
                                for column in portion.columns.clone() {
                                    let before = held[row * width + column].replace(portion.holders);
                                    assert!(before.is_none_or(|before| before == portion.holders), "{name}");
                                }
                            }
                        }
                    }
                    assert!(held.iter().all(Option::is_some), "{name} of {tp} x {ep} x {moe_tp}");
                }
            }
        }
    }

    #[test]
    fn more_ranks_than_parts_are_refused_with_the_numbers() {
        let message = |tp, ep, moe_tp| decoder(6, 2).check_shares(tp, ep, moe_tp).expect_err("too many").to_string();
        assert!(message(7, 1, 1).contains("7 ranks cannot share 6 query heads over 2"), "{}", message(7, 1, 1));
        assert!(message(1, 6, 1).contains("ep 6 leaves ranks without one of the 5 experts"));
        assert!(message(1, 1, 7).contains("width 6 of an expert"));
    }
}
