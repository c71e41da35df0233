// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"context"
	"errors"
	"os"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// ErrNotOwned is wrapped by errors about a chain that bears the name of ours
// and holds rules which neither we nor the agents write.
var ErrNotOwned = errors.New("chain belongs to somebody else")

// ErrUnusable is wrapped by errors about a backend that cannot work on this
// host at all: no program, no permission, no support in the kernel.
var ErrUnusable = errors.New("backend unusable")

// Choice is a form in which a node keeps a chain.
type Choice struct {
	Backend policy.Backend
	Variant string // of iptables: VariantNFT or VariantLegacy; else ""
	// PlainPorts tells that source ports cannot be chosen fully at random.
	PlainPorts bool
}

// The variants of iptables. They keep their rules in different places of the
// kernel and do not see each other's.
const (
	VariantNFT    = "nft"
	VariantLegacy = "legacy"
)

// String writes iptables (nft), nftables.
func (c Choice) String() string {
	if c.Variant == "" {
		return string(c.Backend)
	}
	return string(c.Backend) + " (" + c.Variant + ")"
}

// SamePlace reports whether both choices keep rules in the same place of the
// kernel.
func (c Choice) SamePlace(d Choice) bool {
	return c.Backend == d.Backend && c.Variant == d.Variant
}

// ChainRef names a chain of one family.
type ChainRef struct {
	Family policy.Family
	Name   string
}

// OwnedChain is a chain whose comment names its owner, and where it stands.
type OwnedChain struct {
	ChainRef
	Choice Choice
	Owner  policy.Owner
}

// Backend keeps masquerade chains in the kernel, in one form, in the network
// namespace of the calling process.
type Backend interface {
	// Layout tells in which form the desired rules have to be given.
	Layout() policy.Layout

	// Exclusive tells that the tables are ours alone: Observe reads all that
	// stands in them, and Apply leaves nothing but what is desired.
	Exclusive() bool

	// Observe reads what stands in the kernel. It reads the named chains. It
	// writes nothing and, with nf_tables, runs no program but to show what it
	// cannot read. A chain that is
	// not there is not in the answer, and its absence no error.
	Observe(ctx context.Context, chains []ChainRef) (policy.Ruleset, error)

	// Apply makes the kernel have exactly the desired chains, of each family
	// in one transaction, and writes only what differs. Jumps that stand
	// twice collapse to one. Apply knows no strangers: whether a chain may be taken over
	// is decided before. Children that write inherit the held lock.
	Apply(ctx context.Context, desired policy.Ruleset, held *os.File) error

	// Remove takes chains away, with the jumps to them. Those that are not
	// there are no error.
	Remove(ctx context.Context, chains []ChainRef, held *os.File) error

	// Able tells why rules of a family cannot be written now, where that can be
	// known without trying: nobody notices as long as they are right. It runs no
	// program but to ask which variant it is.
	Able(ctx context.Context, f policy.Family) error

	// Lacks returns what is not there yet of the site for a family's chains. The
	// next Apply makes it, and Remove leaves it, for it is everybody's by then.
	// SiteThere is also the answer of a backend that leaves nothing behind, or
	// whose sites nobody can take away.
	Lacks(ctx context.Context, f policy.Family) (Site, error)

	// Vacate takes away what was made of a site, but only if nothing whatever is
	// in it by now. That somebody uses it, or took it away, is no error.
	Vacate(ctx context.Context, f policy.Family, made Site) error
}

// Site is a part of what chains stand in where they share it with others: a
// table, and in it the base chain that the kernel begins at.
type Site string

// The parts of a site that can be missing. SiteTable means the base chain too.
const (
	SiteThere Site = ""
	SiteTable Site = "table"
	SiteChain Site = "chain"
)

// Driver finds out about one backend on this host and opens it.
type Driver interface {
	// Backend is the name by which configuration asks for it.
	Backend() policy.Backend

	// Open returns the backend in a form that was chosen before. It reads
	// nothing and runs no program.
	Open(Choice) (Backend, error)

	// Render writes the rules as input of the backend's own tool, which loads
	// it as often as it is given to it, with the same result. One input can
	// hold one family or all of them, as the tool has it: where none is named it
	// holds every one that it can, IPv4 alone if it is one. The rules have to be
	// in the Layout of a backend that the driver opens. Render touches nothing.
	Render(desired policy.Ruleset, families ...policy.Family) ([]byte, error)

	// Uses returns the forms in which a chain of the name stands, in
	// any family, without loading a module or making a table to find out.
	Uses(ctx context.Context, chain string) ([]Choice, error)

	// Owned returns the chains of the network namespace that name an owner,
	// whichever that is. It loads no module and makes no table to find them.
	Owned(ctx context.Context) ([]OwnedChain, error)

	// Probe returns the form in which this host can keep rules: the one that
	// it prefers or, where the variant is named, that. Its errors wrap
	// ErrUnusable and say what to install or to change.
	Probe(ctx context.Context, variant string) (Choice, error)
}
