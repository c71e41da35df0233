// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// commentType is NFTNL_UDATA_RULE_COMMENT. The kernel does not interpret a rule's user data; the format is
// libnftnl's.
const commentType = 0

// maxUserData is the size of a rule's user data in the kernel, in bytes (NFT_USERDATA_MAXLEN).
const maxUserData = 256

// Rule is a rule of nf_tables.
type Rule struct {
	Chain  string
	Handle uint64
	Exprs  []Expr
	// Comment is the comment that nft shows. That of an iptables rule is a Match expression instead.
	Comment string
}

// Rules returns the rules of a chain in their order, or those of all chains of the table if the chain is
// "". There are none if the table or the chain does not exist; Chain tells whether it does.
func (c *Conn) Rules(family Family, table, chain string) ([]Rule, error) {
	op := operation{"list rules of", family, table, chain}
	var d ruleDecoder
	return list(c, op, unix.NFT_MSG_GETRULE, unix.NFTA_RULE_CHAIN, func(rules []Rule, t *attrTable) []Rule {
		previous := chain
		if len(rules) > 0 {
			previous = rules[len(rules)-1].Chain
		}
		return append(rules, d.decode(t, previous))
	})
}

// ruleDecoder decodes the rules of one list. It decodes equal expressions once.
type ruleDecoder struct {
	known map[string]Expr // by their encoding
	exprs []Expr          // the rules' Exprs are parts of it
}

// expr decodes what an NFTA_LIST_ELEM of a rule holds.
func (d *ruleDecoder) expr(b []byte) Expr {
	const limit = 64
	e, known := d.known[string(b)]
	if known {
		return e
	}
	if d.known == nil {
		d.known = map[string]Expr{}
	}
	e = decodeExpr(b)
	if _, differs := e.(Cmp); !differs && len(d.known) < limit {
		d.known[string(b)] = e
	}
	return e
}

// decode decodes a rule. The name of its chain is not allocated again if it is the expected one.
func (d *ruleDecoder) decode(t *attrTable, expected string) Rule {
	const perRule, perArray = 16, 256
	r := Rule{
		Chain:   expected,
		Handle:  t.u64(unix.NFTA_RULE_HANDLE),
		Comment: decodeComment(t.at[unix.NFTA_RULE_USERDATA]),
	}
	if name := untilNUL(t.at[unix.NFTA_RULE_CHAIN]); string(name) != expected {
		r.Chain = string(name)
	}
	if cap(d.exprs)-len(d.exprs) < perRule {
		d.exprs = make([]Expr, 0, perArray)
	}
	first := len(d.exprs)
	it := attrIter{rest: t.at[unix.NFTA_RULE_EXPRESSIONS]}
	for it.next() {
		d.exprs = append(d.exprs, d.expr(it.data))
	}
	r.Exprs = slices.Clip(d.exprs[first:])
	t.bad = t.bad || it.malformed || !t.has(unix.NFTA_RULE_CHAIN)
	return r
}

// decodeComment finds the comment among records of type, length (a byte each) and value.
func decodeComment(data []byte) string {
	for len(data) >= 2 {
		n := 2 + int(data[1])
		if n > len(data) {
			return ""
		}
		if data[0] == commentType {
			return string(untilNUL(data[2:n]))
		}
		data = data[n:]
	}
	return ""
}

func (w *attrWriter) comment(comment string) {
	if comment == "" {
		return
	}
	n := len(comment) + 1
	if 2+n > maxUserData {
		w.fail("comment of %d bytes is too long for a rule", len(comment))
		return
	}
	if strings.IndexByte(comment, 0) >= 0 {
		w.fail("comment %q holds a NUL byte", comment)
		return
	}
	data := append(make([]byte, 0, 2+n), commentType, byte(n))
	data = append(append(data, comment...), 0)
	w.bytes(unix.NFTA_RULE_USERDATA, data)
}

// expressions writes a rule's expressions.
func (w *attrWriter) expressions(exprs []Expr) {
	w.nest(func() {
		for _, e := range exprs {
			w.nest(func() {
				w.str(unix.NFTA_EXPR_NAME, ExprName(e))
				w.nest(func() { w.expr(e) }, unix.NFTA_EXPR_DATA)
			}, unix.NFTA_LIST_ELEM)
		}
	}, unix.NFTA_RULE_EXPRESSIONS)
}
