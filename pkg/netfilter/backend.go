// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/containernetworking/plugins/pkg/utils/sysctl"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Errors that others wrap.
var (
	// ErrNotOwned is about a chain whose rules or jumps neither ip-masq nor an agent writes.
	ErrNotOwned = errors.New("chain belongs to another program")
	// ErrUnusable is about a lack of programs, permissions or support in the kernel.
	ErrUnusable = errors.New("backend unusable")
	// ErrBusy is about programs that were busy or killed, and about readings that failed: the host may be fine.
	ErrBusy = errors.New("try again later")
	// ErrChanged is about rules that are no longer those of the observation.
	ErrChanged = errors.New("the rules changed since they were read")
)

// CheckTableOwner returns that another program has made itself the owner of a table of nf_tables, or nil.
func CheckTableOwner(f nfnetlink.Family, t nfnetlink.Table) error {
	if t.Owner == 0 {
		return nil
	}
	return fmt.Errorf("%w: table %s %s is owned by another program (flags owner, netlink port %d, which is "+
		"often its pid), which alone may change it as long as it runs; end it", ErrUnusable, f, t.Name, t.Owner)
}

// Choice is the backend of a chain, with its variant.
type Choice struct {
	Backend policy.Backend
	Variant string // of iptables: VariantNFT or VariantLegacy; else ""
}

// The variants of iptables. The kernel keeps their rules apart.
const (
	VariantNFT    = "nft"
	VariantLegacy = "legacy"
)

// String returns iptables (nft), iptables (legacy) or nftables.
func (c Choice) String() string {
	if c.Variant == "" {
		return string(c.Backend)
	}
	return string(c.Backend) + " (" + c.Variant + ")"
}

// DeleteCommand returns the command that deletes a rule of a chain in iptables, by its number.
func DeleteCommand(c Choice, f policy.Family, chain string, number int) string {
	program := "iptables"
	if f == policy.IPv6 {
		program = "ip6tables"
	}
	return fmt.Sprintf("%s-%s -t nat -D %s %d", program, c.Variant, chain, number)
}

// HasGeneration reports whether the kernel counts changes to chains of this choice.
func (c Choice) HasGeneration() bool { return c.Variant != VariantLegacy }

// OwnedChain is a chain whose comment names its owner.
type OwnedChain struct {
	policy.ChainFamily
	Choice Choice
	// Guard tells that it is a chain of the table ip-masq-guard, guard-X or enforce-X for a masquerade chain X.
	// Else it is a masquerade chain.
	Guard bool
	Owner policy.Owner
}

// String names the chain for messages.
func (c OwnedChain) String() string {
	in := c.Choice.String()
	if c.Guard {
		in = "table " + GuardTable
	}
	return fmt.Sprintf("chain %s (%s) in %s", c.Chain, c.Family, in)
}

// Generation is the generation of the nf_tables ruleset of one network namespace. While it is the
// same, no program has committed a change. (At 100 commits a second it wraps after 16 months.)
type Generation struct {
	Namespace uint64 // its cookie, unique in this boot; 0 is the initial namespace
	// ModuleLoad differs each time that the kernel module is loaded; 0 if nf_tables is built in.
	ModuleLoad uint64
	Number     uint32
}

// String returns namespace.load.number.
func (g Generation) String() string {
	return fmt.Sprintf("%d.%d.%d", g.Namespace, g.ModuleLoad, g.Number)
}

// Observation is what a backend read from the kernel.
type Observation struct {
	Rules policy.Ruleset
	// Generation is the one at which Rules were read, if nothing was committed during the reading and Apply
	// refuses to write at any other generation; else 0.
	Generation uint32
	State      any // the backend's own form of what it read, for Apply
}

// Backend keeps masquerade chains in the network namespace of the calling process.
type Backend interface {
	// Layout returns the form that the desired rules must have. It runs no program.
	Layout() policy.Layout

	// Supported returns Layout without what the host's programs cannot write. It runs the program of
	// iptables-legacy to learn its version, once in a process if the program has the variant in its name.
	Supported(ctx context.Context) (policy.Layout, error)

	// OwnsTables reports whether Observe reads whole tables, and Apply leaves nothing else there.
	OwnsTables() bool

	// Observe reads the named chains that exist. It writes nothing, and runs a program only to print a chain
	// of another program (policy.Chain.Printed).
	Observe(ctx context.Context, chains []policy.ChainFamily) (Observation, error)

	// Apply writes the difference between an observation and the desired chains, so that the kernel
	// has exactly those. nftables sends one batch that fills new sets, then one with the rest, for
	// both families; it fails with ErrChanged if the owned rules have changed since the
	// observation. Given the zero Observation, it reads the kernel first. iptables runs one
	// iptables-restore per family, for which it reads the rules again. Apply does not check
	// ownership; its callers do. Child processes that write inherit the held lock.
	Apply(ctx context.Context, desired policy.Ruleset, from Observation, held *os.File) error

	// Remove removes chains and the jumps to them. A missing chain is not an error.
	Remove(ctx context.Context, chains []policy.ChainFamily, held *os.File) error

	// CanWrite returns why rules of a family cannot be written now, as far as it is known. It runs
	// programs only to find out their variant.
	CanWrite(ctx context.Context, f policy.Family) error

	// CanList returns why the programs of the host do not list the table in which the rules would be: nobody who
	// looks for them there would see them.
	CanList(ctx context.Context, f policy.Family) error

	// CheckWrite returns the error that Apply would return, and changes no rules. nftables sends
	// the same change as one batch that is not committed. iptables writes the desired chains in a
	// network namespace of its own.
	CheckWrite(ctx context.Context, desired policy.Ruleset, from Observation) error
}

// HowToLoad returns the remedy for missing kernel modules, whose names are separated by spaces.
func HowToLoad(modules string) string {
	disabled, err := sysctl.Sysctl("kernel/modules_disabled")
	if err == nil && disabled == "1" {
		return "kernel.modules_disabled forbids to load modules: name " + modules +
			" in a file of /etc/modules-load.d and reboot the node"
	}
	if strings.Contains(modules, " ") {
		modules = "-a " + modules
	}
	return "try: modprobe " + modules
}

// GuardTable is the name of the nftables table with the guards of a family.
const GuardTable = "ip-masq-guard"

// GuardTables keeps the tables ip-masq-guard in the network namespace of the calling process.
type GuardTables interface {
	// ObserveGuards reads the tables. Its error wraps ErrUnusable on a kernel without nf_tables.
	ObserveGuards(ctx context.Context) (GuardObservation, error)

	// CompareGuards returns the differences between the desired guards and an observation: of kind
	// ElementChange for the elements of a set that exists, else GuardChange. Change.Chain is the
	// masquerade chain, or "" for what belongs to none. An observation without State is one of
	// tables with its Guards.
	CompareGuards(desired []policy.Guard, observed GuardObservation) policy.Diff

	// ApplyGuards writes the difference between an observation and the desired guards as Apply
	// does, so that the tables have exactly those; without any there are no tables. It recreates a
	// table that cannot be changed.
	ApplyGuards(ctx context.Context, desired []policy.Guard, from GuardObservation) error

	// CheckGuards returns the error that ApplyGuards would return, and changes nothing: ErrUnusable
	// if the kernel lacks what the guards need. It does not ask for tables that do not exist, if
	// this process saw that the kernel can have them.
	CheckGuards(ctx context.Context, desired []policy.Guard, from GuardObservation) error
}

// GuardObservation is the content of the guard tables.
type GuardObservation struct {
	// Guards are those that have rules. Scope.Sources, Exempt or Bound is nil if its set does not
	// exist or is not one of addresses.
	Guards []policy.Guard
	// The counters of the guards, and the numbers of connections that enforceExempt bound, by masquerade
	// chain.
	Packets, Bound map[policy.ChainFamily]uint64

	Exists     bool   // one of the tables exists
	Generation uint32 // of the nf_tables ruleset; 0 if the reading is not of one
	State      any    // the tables as they were read, for CompareGuards and ApplyGuards
}
