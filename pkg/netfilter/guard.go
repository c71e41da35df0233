// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"context"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// GuardTable is the name of the nftables table with the guards of a family.
const GuardTable = "ip-masq-guard"

// GuardTables keeps the tables `ip ip-masq-guard` and `ip6 ip-masq-guard` in the network namespace of the
// calling process. They exist beside the masquerade chains of any backend.
type GuardTables interface {
	// ObserveGuards reads the tables. Its error wraps ErrUnusable on a kernel without nf_tables.
	ObserveGuards(ctx context.Context) (GuardObservation, error)

	// CompareGuards returns the differences between the desired guards and an observation: of kind
	// ElementChange for the elements of a set that exists, else GuardChange. Change.Chain is the masquerade
	// chain, or "" for what belongs to none. An observation without State is one of tables with its Guards. It
	// touches nothing.
	CompareGuards(desired []policy.Guard, observed GuardObservation) policy.Diff

	// ApplyGuards writes the difference between an observation and the desired guards, so that the tables
	// hold exactly those; without any there are no tables. It sends one batch that fills new sets, then one
	// with the rest, for both families. It recreates a table that cannot be changed, and fails with
	// ErrChanged if the tables have changed since the observation; if that is zero, it reads them itself.
	// It does not check ownership; its callers do.
	ApplyGuards(ctx context.Context, desired []policy.Guard, from GuardObservation) error

	// CheckGuards asks the kernel whether it accepts what ApplyGuards would write, and returns the error of
	// ApplyGuards: one that wraps ErrUnusable if the kernel lacks what the guards need. It changes nothing. It
	// does not ask again for tables that do not exist, if this process saw that the kernel can have them.
	CheckGuards(ctx context.Context, desired []policy.Guard, from GuardObservation) error

	// RenderGuards returns the tables of the families, of all if none is named, as input for `nft -f`, which
	// recreates them. A family without a guard loses its table. It touches nothing.
	RenderGuards(desired []policy.Guard, families ...policy.Family) []byte
}

// GuardObservation is the content of the guard tables.
type GuardObservation struct {
	// Guards are the guards that have rules. Scope.Sources, Exempt or Bound is nil if the set does not exist or is
	// not one of addresses.
	Guards     []policy.Guard
	Packets    map[policy.ChainFamily]uint64 // the counters of the guards, by masquerade chain
	Bound      map[policy.ChainFamily]uint64 // the numbers of connections that enforceExempt bound, by masquerade chain
	Exists     bool                          // one of the tables exists
	Generation uint32                        // of the nf_tables ruleset; 0 if the reading is not of one
	State      any                           // the tables as they were read, for CompareGuards and ApplyGuards
}
