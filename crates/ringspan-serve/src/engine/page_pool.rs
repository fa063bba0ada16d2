//! Reference counts of the cache's pages on every rank, kept by rank 0: a page is free, used by sequences, or only in the prefix
//! cache.

/// Counts the holders of each page of each rank. A page is free, *used* (sequences hold it) or *cached* (only the prefix cache
/// has it).
#[derive(Debug)]
pub(super) struct PagePool {
    ranks: Vec<RankPages>,
}

#[derive(Debug)]
struct RankPages {
    free: Vec<u32>,
    /// For each page, the number of sequences that hold it.
    holders: Vec<u32>,
    /// For each page, whether it is in the prefix cache.
    in_prefix_cache: Vec<bool>,
    /// Number of pages that only the prefix cache has.
    cached: usize,
}

impl PagePool {
    /// `pages` free pages on each of `ranks` ranks.
    pub(super) fn new(ranks: usize, pages: u32) -> Self {
        let rank = || RankPages {
            // The last of the list is taken first, so pages are used in ascending order.
            free: (0..pages).rev().collect(),
            holders: vec![0; pages as usize],
            in_prefix_cache: vec![false; pages as usize],
            cached: 0,
        };
        Self { ranks: (0..ranks).map(|_| rank()).collect() }
    }

    pub(super) fn ranks(&self) -> usize {
        self.ranks.len()
    }

    /// Number of pages of all ranks.
    pub(super) fn count(&self) -> usize {
        self.ranks.iter().map(|rank| rank.holders.len()).sum()
    }

    /// Allocates a free page of a rank for one sequence.
    pub(super) fn allocate(&mut self, rank: usize) -> Option<u32> {
        let rank = &mut self.ranks[rank];
        let page = rank.free.pop()?;
        debug_assert!(
            rank.holders[page as usize] == 0 && !rank.in_prefix_cache[page as usize],
            "page {page} was not free"
        );
        rank.holders[page as usize] = 1;
        Some(page)
    }

    /// Adds a holder to a page that is used or cached.
    pub(super) fn hold(&mut self, rank: usize, page: u32) {
        let rank = &mut self.ranks[rank];
        let holders = &mut rank.holders[page as usize];
        debug_assert!(*holders > 0 || rank.in_prefix_cache[page as usize], "page {page} is free");
        if *holders == 0 {
            rank.cached -= 1;
        }
        *holders += 1;
    }

    /// Removes a holder; the page becomes free unless others hold it or it is in the prefix cache. Returns whether it was the
    /// last holder.
    pub(super) fn release(&mut self, rank: usize, page: u32) -> bool {
        let rank = &mut self.ranks[rank];
        let holders = &mut rank.holders[page as usize];
        debug_assert!(*holders > 0, "page {page} has no holder");
        *holders -= 1;
        let last = *holders == 0;
        match (last, rank.in_prefix_cache[page as usize]) {
            (true, true) => rank.cached += 1,
            (true, false) => rank.free.push(page),
            (false, _) => {}
        }
        last
    }

    /// Puts a page that a sequence holds into the prefix cache.
    pub(super) fn mark_cached(&mut self, rank: usize, page: u32) {
        let rank = &mut self.ranks[rank];
        debug_assert!(
            rank.holders[page as usize] > 0 && !rank.in_prefix_cache[page as usize],
            "page {page} cannot be cached"
        );
        rank.in_prefix_cache[page as usize] = true;
    }

    /// Frees a page that only the prefix cache has.
    pub(super) fn evict(&mut self, rank: usize, page: u32) {
        let rank = &mut self.ranks[rank];
        debug_assert!(
            rank.holders[page as usize] == 0 && rank.in_prefix_cache[page as usize],
            "page {page} is not cached"
        );
        rank.in_prefix_cache[page as usize] = false;
        rank.cached -= 1;
        rank.free.push(page);
    }

    /// Takes a page out of the prefix cache; the sequences that hold it go on holding it.
    pub(super) fn uncache(&mut self, rank: usize, page: u32) {
        let rank = &mut self.ranks[rank];
        debug_assert!(
            rank.holders[page as usize] > 0 && rank.in_prefix_cache[page as usize],
            "page {page} is not cached and held"
        );
        rank.in_prefix_cache[page as usize] = false;
    }

    /// Whether sequences hold a page.
    pub(super) fn is_held(&self, rank: usize, page: u32) -> bool {
        self.ranks[rank].holders[page as usize] > 0
    }

    /// Number of pages of a rank that are free or cached.
    pub(super) fn available(&self, rank: usize) -> usize {
        self.ranks[rank].free.len() + self.ranks[rank].cached
    }

    /// Number of pages of a rank that only the prefix cache has.
    pub(super) fn cached(&self, rank: usize) -> usize {
        self.ranks[rank].cached
    }

    /// Number of pages of a rank that sequences hold.
    pub(super) fn used(&self, rank: usize) -> usize {
        self.ranks[rank].holders.len() - self.available(rank)
    }

    /// Panics if a page is in two lists or in none, or if a count is wrong.
    #[cfg(test)]
    pub(super) fn check(&self) {
        for rank in &self.ranks {
            let mut free = vec![false; rank.holders.len()];
            for page in &rank.free {
                assert!(!std::mem::replace(&mut free[*page as usize], true), "page {page} is free twice");
            }
            let cached = (0..free.len()).filter(|page| rank.in_prefix_cache[*page] && rank.holders[*page] == 0).count();
            assert_eq!(cached, rank.cached);
            for (page, free) in free.iter().enumerate() {
                assert_eq!(*free, !rank.in_prefix_cache[page] && rank.holders[page] == 0, "page {page}");
            }
        }
    }

    /// Number of sequences that hold a page.
    pub(super) fn ref_count(&self, rank: usize, page: u32) -> u32 {
        self.ranks[rank].holders[page as usize]
    }
}
