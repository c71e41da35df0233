// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
)

// Validate judges a statement by itself, whatever other sources say. Its errors
// are FieldErrors, all that there are, joined. Most is the source's cidrLimit.
func (s SourcePolicy) Validate(most int) error {
	var errs []error
	fail := func(key string, index int, value, format string, args ...any) {
		errs = append(errs, &FieldError{key, index, value, fmt.Errorf(format, args...).Error()})
	}
	if err := ValidateChainName(s.Chain); err != nil {
		fail("masqChain", -1, s.Chain, "%w", err)
	}
	if n := len(s.NonMasqueradeCIDRs) + len(s.MasqueradeCIDRs); n > most {
		fail("cidrLimit", -1, "", "nonMasqueradeCIDRs and masqueradeCIDRs have %d entries together, "+
			"more than the %d allowed; remove some or raise cidrLimit", n, most)
	}
	s.validateTwice(fail)
	errs = append(errs, s.Bounds()...)
	for _, l := range s.prefixLists() {
		for i, p := range l.prefixes {
			// A stored statement has not come through ParsePrefix.
			if !isProper(p) {
				_, err := ParsePrefix(p.String())
				fail(l.key, i, p.String(), "%w", err)
			} else if FamilyOf(p.Addr()) == IPv6 && !isTrue(s.EnableIPv6) {
				fail(l.key, i, p.String(), "is an IPv6 prefix, but IPv6 is not enabled; set enableIPv6 to true, or remove it")
			}
		}
	}
	for i, name := range s.OutputInterfaces {
		if err := validateInterface(name); err != nil {
			fail("outputInterfaces", i, name, "%w", err)
		}
	}
	return errors.Join(errs...)
}

// validateTwice looks for prefixes that are in both lists.
func (s SourcePolicy) validateTwice(fail func(key string, index int, value, format string, args ...any)) {
	if len(s.MasqueradeCIDRs) == 0 {
		return
	}
	exempt := make(map[netip.Prefix]int, len(s.NonMasqueradeCIDRs))
	for i, p := range s.NonMasqueradeCIDRs {
		exempt[p] = i
	}
	for i, p := range s.MasqueradeCIDRs {
		if at, both := exempt[p]; both {
			fail("masqueradeCIDRs", i, p.String(), "is in nonMasqueradeCIDRs[%d] too; remove one of the two", at)
		}
	}
}

// isProper reports whether the prefix is one that ParsePrefix returns.
func isProper(p netip.Prefix) bool { return p.IsValid() && !p.Addr().Is4In6() && p == p.Masked() }

// prefixLists returns every list of prefixes with its key.
func (s SourcePolicy) prefixLists() []listed {
	return append(destinationLists(s),
		listed{key: "sourceCIDRs", prefixes: s.SourceCIDRs},
		listed{key: "nonMasqueradeSourceCIDRs", prefixes: s.NonMasqueradeSourceCIDRs})
}

// validateInterface holds names to what the kernel accepts (IFNAMSIZ: 15 bytes
// and none of '/', ':' and white space) and to what both backends can write.
func validateInterface(name string) error {
	switch bare := strings.TrimSuffix(name, "+"); {
	case name == "":
		return errors.New("is empty; name an interface, or drop the item")
	case bare == "":
		return errors.New("would match every interface; leave outputInterfaces out instead")
	case len(name) > 15:
		return errors.New("is longer than the 15 bytes of an interface's name")
	case bare == "." || bare == ".." || strings.ContainsFunc(name, notInInterface):
		return errors.New("is not the name of an interface; use visible ASCII without '/', ':', '\"', '\\', '!' and '*'")
	}
	return nil
}

func notInInterface(r rune) bool { return r <= ' ' || r > '~' || strings.ContainsRune(`/:"\!*`, r) }
