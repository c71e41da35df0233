// SPDX-License-Identifier: Apache-2.0

package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Record is what we own in the kernel, and the form chosen for each chain. It
// holds for one boot: the kernel keeps no rules beyond that.
type Record struct {
	Boot   string       `json:"boot,omitempty"`
	Chains []OwnedChain `json:"chains,omitempty"` // in the writer's order
}

// OwnedChain is a chain of one family that we made, or were about to make.
type OwnedChain struct {
	Chain   string         `json:"chain"`
	Family  policy.Family  `json:"family"`
	Backend policy.Backend `json:"backend"` // iptables or nftables
	Variant string         `json:"variant,omitempty"`
	// PlainPorts tells that source ports cannot be chosen fully at random.
	PlainPorts bool `json:"plainPorts,omitempty"`
	// Stuck tells that the chain was to go and could not be removed.
	Stuck bool `json:"stuck,omitempty"`
}

// The variants of iptables. nftables has none.
const (
	variantNFT    = "nft"
	variantLegacy = "legacy"
)

// Equal reports whether both list the same in the same order.
func (r Record) Equal(s Record) bool {
	return r.Boot == s.Boot && slices.Equal(r.Chains, s.Chains)
}

type recordDocument struct {
	Schema int `json:"schema"`
	Record
}

func encodeRecord(r Record) ([]byte, error) {
	if err := r.validate(); err != nil {
		return nil, err
	}
	data, err := json.Marshal(recordDocument{Schema, r})
	if err != nil {
		return nil, err
	}
	again, err := decodeRecord(data)
	if err == nil && !again.Equal(r) {
		err = errors.New("it does not read back as it was written")
	}
	return data, err
}

func decodeRecord(data []byte) (Record, error) {
	var d recordDocument
	if err := decode(data, &d, &d.Schema); err != nil {
		return Record{}, err
	}
	if err := d.validate(); err != nil {
		return Record{}, err
	}
	return d.Record, nil
}

// validate judges a record. What it lists will be removed some day, so a chain
// that cannot be ours must never be in it.
func (r Record) validate() error {
	for i, c := range r.Chains {
		if err := policy.ValidateChainName(c.Chain); err != nil {
			return fmt.Errorf("chains[%d]: chain %s %w", i, policy.Quote(c.Chain), err)
		}
		if !slices.Contains(policy.Families(), c.Family) {
			return fmt.Errorf("chains[%d]: %s is not a family", i, policy.Quote(string(c.Family)))
		}
		if !knownForm(c.Backend, c.Variant) {
			return fmt.Errorf("chains[%d]: backend %s with variant %s is not one that rules can be in",
				i, policy.Quote(string(c.Backend)), policy.Quote(c.Variant))
		}
	}
	return nil
}

func knownForm(b policy.Backend, variant string) bool {
	return b == policy.NFTables && variant == "" ||
		b == policy.IPTables && (variant == variantNFT || variant == variantLegacy)
}
