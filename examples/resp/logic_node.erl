#!/usr/bin/env escript
%% A logic node with eredis. Run it as `escript logic_node.erl`, with PORT and TOKEN in the environment, and the folder of
%% eredis in ERL_LIBS.
-mode(compile).

main(_) ->
    Port = list_to_integer(os:getenv("PORT", "7417")),
    Token = os:getenv("TOKEN", ""),
    {ok, C} = eredis:start_link("127.0.0.1", Port, 0, Token),
    {ok, _} = eredis:q(C, ["AW.ADD", "101:7", "102:8"]),
    {ok, [Outcome]} = eredis:q(C, ["AW.DEL", "101:7"]),
    io:format("~s~n", [Outcome]),
    take(C).

take(C) ->
    {ok, Batches} = eredis:q(C, ["AW.TAKE", "default", "BLOCK", "2000"], 10000),
    lists:foreach(fun([Batch, _, Messages | _]) ->
        lists:foreach(fun store_offline/1, Messages),
        {ok, _} = eredis:q(C, ["AW.ACK", "default", Batch])
    end, Batches),
    take(C).

store_offline(Message) ->
    io:format("offline ~s~n", [lists:join(" ", string:split(Message, ":"))]).
