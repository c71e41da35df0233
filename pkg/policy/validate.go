// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"fmt"
	"net/netip"
)

// Validate checks the policy of a source by itself. Its errors are FieldErrors, all
// that there are, joined. Limit is the source's cidrLimit.
func (s SourcePolicy) Validate(limit int) error {
	var errs fieldErrors
	errs.check("masqChain", s.Chain, ValidateChainName(s.Chain))
	n := len(s.NonMasqueradeCIDRs) + len(s.MasqueradeCIDRs)
	if n > limit {
		errs.add("cidrLimit", -1, "", fmt.Errorf("nonMasqueradeCIDRs and masqueradeCIDRs have %d entries together, "+
			"more than the %d allowed; remove some or raise cidrLimit", n, limit))
	}
	errs.checkBothLists(s.NonMasqueradeCIDRs, s.MasqueradeCIDRs)
	errs.checkCounts(len(s.SourceCIDRs), len(s.OutputInterfaces), len(s.NonMasqueradeSourceCIDRs), len(s.PodCIDRs))
	for _, k := range Keys(&s) {
		errs.checkField(k, isTrue(s.EnableIPv6))
	}
	for i, name := range s.OutputInterfaces {
		if err := ValidateInterface(name); err != nil {
			errs.add("outputInterfaces", i, name, err)
		}
	}
	return errors.Join(errs...)
}

// checkBothLists adds the prefixes that are in both lists.
func (e *fieldErrors) checkBothLists(nonMasquerade, masquerade []netip.Prefix) {
	if len(masquerade) == 0 {
		return
	}
	exempt := make(map[netip.Prefix]bool, len(nonMasquerade))
	for _, p := range nonMasquerade {
		exempt[p] = true
	}
	for i, p := range masquerade {
		if exempt[p] {
			problem := errors.New("is in nonMasqueradeCIDRs too; remove one of the two")
			e.add("masqueradeCIDRs", i, p.String(), problem)
		}
	}
}

// checkField adds what is wrong with a single value or item, for most types. Validate checks the names of
// outputInterfaces and the other types itself.
func (e *fieldErrors) checkField(k Key, ipv6 bool) {
	switch to := k.Field.(type) {
	case *[]netip.Prefix:
		e.checkPrefixes(k.Name, *to, ipv6)
	case *AddressItems:
		e.checkPrefixes(k.Name, *to, ipv6)
		e.checkLength(k.Name, len(*to), MaxAddressItems, "remove some, or write wider prefixes")
	case *Namespaces:
		e.checkLength(k.Name, len(*to), MaxNamespaces, "remove some")
		for i, name := range *to {
			if _, err := ParseNamespace(name); err != nil {
				e.add(k.Name, i, name, err)
			}
		}
	case Word:
		value := to.String()
		if value != "" {
			e.check(k.Name, value, to.Set(value))
		}
	}
}

func (e *fieldErrors) checkLength(key string, n, most int, remedy string) {
	if n > most {
		e.add(key, -1, "", fmt.Errorf("has %d entries, more than the %d possible; %s", n, most, remedy))
	}
}

// Limits on the rules that configuration can ask for. Each pair of a source and an
// output interface is a jump; in a backend without sets each exempt source is a rule.
// Pod ranges are elements of sets. The number of networks, and so of chains, has no
// limit: only administrators create networks, unless Multus lets users do so.
const (
	MaxScopePairs    = 4096
	MaxExemptSources = 4096
	MaxPodCIDRs      = 4096
	MaxPortRanges    = 64
	MaxAddressItems  = 64
	MaxNamespaces    = 256
	MaxExemptPods    = 1024  // addresses of one chain, in a backend without sets
	MaxRules         = 65536 // of one chain and family, in a backend without sets
)

type fieldErrors []error

func (e *fieldErrors) add(key string, index int, value string, err error) {
	*e = append(*e, &FieldError{key, index, value, err.Error()})
}

func (e *fieldErrors) check(key, value string, err error) {
	if err != nil {
		e.add(key, -1, value, err)
	}
}

func (e *fieldErrors) checkPrefixes(key string, prefixes []netip.Prefix, ipv6 bool) {
	for i, p := range prefixes {
		switch {
		case !p.IsValid() || p.Addr().Is4In6() || p != p.Masked(): // in a stored document
			_, err := ParsePrefix(p.String())
			e.add(key, i, p.String(), err)
		case FamilyOf(p.Addr()) == IPv6 && !ipv6:
			e.add(key, i, p.String(), errors.New("is an IPv6 prefix, but IPv6 is not enabled; "+
				"set enableIPv6 to true, or remove it"))
		}
	}
}

func (e *fieldErrors) checkCounts(from, out, exempt, pods int) {
	// An empty list counts as one item, which matches everything.
	pairs := int64(max(1, from)) * int64(max(1, out))
	if pairs > MaxScopePairs {
		e.add("sourceCIDRs", -1, "", fmt.Errorf("has %d entries, which with the %d of outputInterfaces "+
			"make %d pairs, more than the %d possible; remove some", from, out, pairs, MaxScopePairs))
	}
	e.checkLength("nonMasqueradeSourceCIDRs", exempt, MaxExemptSources, "remove some, or write wider prefixes")
	e.checkLength("podCIDRs", pods, MaxPodCIDRs, "remove some, or write wider prefixes")
}
