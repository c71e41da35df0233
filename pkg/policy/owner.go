// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"crypto/sha256"
	"encoding/hex"
	"strconv"
	"strings"
)

// RulesSchema is the version of the form in which chains are written. A chain
// that says it has a newer one is left alone.
const RulesSchema = 1

// Owner is what a chain of ours says of its writer, in a comment on its last
// rule: a node has one dataDir, and a second would undo what the first did.
// The zero Owner is that of a chain without the comment.
type Owner struct {
	Schema  int
	DataDir string // as OwnedBy has it
}

// OwnedBy returns the owner that rules written from the state in dataDir name.
// A path that a comment cannot hold (xt_comment: 256 bytes; nft: 128) or that
// would need quoting stands there as its hash.
func OwnedBy(dataDir string) Owner {
	plain := func(r rune) bool {
		return r < 0x80 && (isChainRune(r) || r == '/')
	}
	if len(dataDir) > 80 || strings.ContainsFunc(dataDir, func(r rune) bool { return !plain(r) }) {
		sum := sha256.Sum256([]byte(dataDir))
		dataDir = "sha256:" + hex.EncodeToString(sum[:])
	}
	return Owner{Schema: RulesSchema, DataDir: dataDir}
}

// Differs reports whether the owner names another dataDir than p does.
func (o Owner) Differs(p Owner) bool { return o.DataDir != "" && o.DataDir != p.DataDir }

const ownerPrefix, ownerMiddle = "ip-masq/", " keeps its state in "

// Comment returns the text of the comment, which people read too.
func (o Owner) Comment() string {
	if o == (Owner{}) {
		return ""
	}
	return ownerPrefix + strconv.Itoa(o.Schema) + ownerMiddle + o.DataDir
}

// ParseOwner reads a comment, and returns the zero Owner for any that is not one
// of ours. What a newer form says behind its number is not known here.
func ParseOwner(comment string) Owner {
	rest, ours := strings.CutPrefix(comment, ownerPrefix)
	number, said, _ := strings.Cut(rest, " ")
	schema, err := strconv.Atoi(number)
	if !ours || err != nil || schema < 1 {
		return Owner{}
	}
	dir, told := strings.CutPrefix(" "+said, ownerMiddle)
	switch {
	case told:
		return Owner{Schema: schema, DataDir: dir}
	case schema > RulesSchema:
		return Owner{Schema: schema}
	}
	return Owner{}
}
