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
var ErrNotOwned = errors.New("chain belongs to another program")

// ErrUnusable is wrapped by errors about a backend that cannot work on this
// host at all: no program, no permission, no support in the kernel.
var ErrUnusable = errors.New("backend unusable")

// ErrChanged is wrapped by the error of Apply if the rules in the kernel are no
// longer those that it was to change. Observe again.
var ErrChanged = errors.New("the rules changed since they were read")

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
func (c Choice) SameBackend(d Choice) bool {
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

// Observation is what a backend read from the kernel.
type Observation struct {
	Rules      policy.Ruleset
	Generation uint32 // of the nf_tables ruleset; 0 for iptables-legacy, which counts nothing
	State      any    // the backend's own form of what it read, for Apply
}

// Backend keeps masquerade chains in the kernel, in one form, in the network
// namespace of the calling process.
type Backend interface {
	// Layout tells in which form the desired rules have to be given.
	Layout() policy.Layout

	// Exclusive tells that the tables are ours alone: Observe reads all that
	// stands in them, and Apply leaves nothing but what is desired.
	OwnsTables() bool

	// Observe reads what stands in the kernel. It reads the named chains. It
	// writes nothing and, with nf_tables, runs no program but to show what it
	// cannot read. The result lacks the chains that do not exist.
	Observe(ctx context.Context, chains []ChainRef) (Observation, error)

	// Apply writes the difference between an observation and the desired chains,
	// in one transaction per family, so that the kernel has exactly those. It fails
	// with ErrChanged if the rules have changed since the observation; with the zero
	// Observation it reads the kernel itself. Apply does not check ownership; its
	// callers do. Child processes that write inherit the held lock.
	Apply(ctx context.Context, desired policy.Ruleset, from Observation, held *os.File) error

	// Remove takes chains away, with the jumps to them. Those that are not
	// there are no error.
	Remove(ctx context.Context, chains []ChainRef, held *os.File) error

	// Able tells why rules of a family cannot be written now, where that can be
	// known without trying: nobody notices as long as they are right. It runs no
	// program but to ask which variant it is.
	CanWrite(ctx context.Context, f policy.Family) error
}

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
	FindChain(ctx context.Context, chain string) ([]Choice, error)

	// Owned returns the chains of the network namespace that name an owner,
	// whichever that is. It loads no module and makes no table to find them.
	Owned(ctx context.Context) ([]OwnedChain, error)

	// Probe returns the form in which this host can keep rules: the one that
	// it prefers or, where the variant is named, that. Its errors wrap
	// ErrUnusable and say what to install or to change.
	Probe(ctx context.Context, variant string) (Choice, error)
}
